"""Whether a model and its data can be split as `[parallel]` says."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from ...core.text.positions import KeyPath
from ...core.text.tree import Finding
from ...lora.sizes import with_adapters
from ...parallel.mesh import AXES, EXPERT_AXES, SEQUENCE_AXES, Degrees
from ...parallel.placement import aligns, describe_misalignment, used_dim
from ...parallel.rules import check_expressions, check_rules, deciding_patterns, deciding_rules
from ..schema import Recipe
from .pipeline_checks import check_pipeline
from .task_checks import is_bidirectional

OPEN_VOCABULARY = 2**20
"""stands for one that the tokenizer will settle: any even cut of it works out"""


def check_plan(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    """Yield everything that does not fit the degrees.

    Args:
        recipe: tables that are each valid alone.
        degrees: the degree of each axis; -1 for one that is not known yet.
    """
    yield from _overlap(recipe)
    if degrees.tensor > 1:
        yield from _tensor(recipe, degrees)
    yield from _sequence(recipe, degrees.known)
    if degrees.context > 1:
        yield from _context(recipe)
    if degrees.pipeline > 1:
        if recipe.model.layout.pipeline:
            yield from check_pipeline(recipe, degrees)
        else:
            yield _no_plan(recipe, "pipeline")
    if recipe.parallel.expert > 1 or recipe.parallel.expert_tensor > 1:
        yield from _expert(recipe, degrees)
    if recipe.parallel.fsdp.reshard_after_forward:
        yield from _resharding(recipe, degrees)
    if recipe.parallel.rules or recipe.parallel.fsdp.ignored:
        yield from _rules(recipe, degrees)


def _expert(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    given = {axis: getattr(recipe.parallel, axis) for axis in EXPERT_AXES}
    given = {axis: ranks for axis, ranks in given.items() if ranks != 1}
    moe: Any = getattr(recipe.model, "moe", None)
    axes, ranks = " x ".join(given), prod(given.values())
    path: KeyPath = ("parallel", next(iter(given)))
    if not recipe.model.layout.experts or moe is None:
        name = recipe.model.name
        yield path, f'the model "{name}" has no experts that ranks could share', "keep 1"
        return
    stage_axes = [axis for axis in AXES if axis != "pipeline"]
    is_known = degrees.is_known(*stage_axes)
    # Not known: a number of ranks that any degree divides.
    around = degrees.product(stage_axes) if is_known else 0
    sizes: dict[str, list[int]] = {}
    for axis, key in zip(EXPERT_AXES, ("num_experts", "expert_ffn_dim"), strict=True):
        count, degree = getattr(moe, key), given.get(axis, 1)
        sizes[axis] = _divisors(count) if axis in given else [1]
        if count % degree:
            works = [n for n in sizes[axis] if around % (ranks // degree * n) == 0]
            message = f"{degree} ranks cannot share model.moe.{key} = {count} evenly"
            yield ("parallel", axis), message, _nearest(works, degree)
    if around % ranks:
        works = [n for a, b in product(*sizes.values()) if around % (n := a * b) == 0]
        message = f"the {around} ranks of a stage are no multiple of {axes} ({ranks})"
        yield path, message, _nearest(works, ranks)
    # Otherwise `check_rules` says which expression is wrong.
    if not any(True for _ in check_expressions(recipe.parallel)):
        yield from _placed_experts(recipe, path[1])


def _placed_experts(recipe: Recipe, axis: int | str) -> Iterator[Finding]:
    names = with_adapters(recipe.model.with_vocab(OPEN_VOCABULARY), recipe.lora)
    experts = list(filter(recipe.model.layout.is_expert, names))
    for index, rule in enumerate(recipe.parallel.rules):
        for name in list(deciding_rules(experts, [rule]))[:1]:
            message = f"{name} is placed by parallel.{axis}, not by a rule"
            yield ("parallel", "rules", index, "match"), message, "match other parameters"
    for index, pattern in enumerate(recipe.parallel.fsdp.ignored):
        for name in list(deciding_patterns(experts, [pattern]))[:1]:
            message = f"{name} is placed by parallel.{axis}, and FSDP shards it"
            yield ("parallel", "fsdp", "ignored", index), message, "match other parameters"


def _resharding(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    fsdp, known = recipe.parallel.fsdp, degrees.known
    path: KeyPath = ("parallel", "fsdp", "reshard_after_forward")
    pieces, ranks = fsdp.reshard_after_forward, known.fsdp
    if fsdp.sharding.reshard_after_forward is not True:
        message = f'parallel.fsdp.strategy = "{fsdp.strategy}" does not reshard'
        yield path, message, 'leave it out, or take "full_shard" or "hybrid_shard"'
    elif pieces == 1:
        yield path, "one piece is the whole weight", 'leave it out, and take "shard_grad_op"'
    elif degrees.is_known("shard", "context") and ranks > 1 and ranks % pieces:
        hint = _nearest(_divisors(ranks)[1:], pieces)
        yield path, f"{pieces} does not divide the {ranks} ranks that shard (shard x context)", hint
    # What FSDP2 gathers again is a plain tensor, on a mesh that all ranks create (torch 2.13).
    for axis in ("tensor", "pipeline", *EXPERT_AXES):
        if getattr(known, axis) > 1:
            keeps = "keeps weights gathered" if axis == "pipeline" else "splits weights as well"
            hint = f"leave it out, or keep parallel.{axis} = 1"
            yield path, f"parallel.{axis} {keeps}, which FSDP2 does not reshard", hint
    for index, rule in enumerate(recipe.parallel.rules):
        if rule.place.shard_dim:
            message = "FSDP2 reshards weights by dim 0 alone"
            yield ("parallel", "rules", index, "place", "shard"), message, f"leave out {path[2]}"


def _context(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.model.layout.context:
        yield _no_plan(recipe, "context")
    elif is_bidirectional(recipe) and recipe.parallel.context_exchange == "ring":
        yield (
            ("parallel", "context_exchange"),
            "a ring attends to earlier positions alone, and model.attention is bidirectional",
            'take "gather"',
        )


def _no_plan(recipe: Recipe, axis: str) -> Finding:
    return (
        ("parallel", axis),
        f'the model "{recipe.model.name}" has no plan for this axis',
        f"keep parallel.{axis} = 1, and raise parallel.shard",
    )


def _tensor(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    path: KeyPath = ("parallel", "tensor")
    tensor = degrees.tensor
    if not recipe.model.layout.tensor:
        yield _no_plan(recipe, "tensor")
        return
    sizes = _tensor_sizes(recipe)
    for key in _uneven(sizes, tensor):
        # Together: a degree that suits the heads may not suit the rest.
        works = [n for n in range(1, sizes.get("n_heads", tensor) + 1) if not _uneven(sizes, n)]
        how = "with a row for each" if key == "vocab_size" else "evenly"
        message = f"{tensor} ranks cannot share model.{key} = {sizes[key]} {how}"
        yield path, message, _nearest(works, tensor)
    rows, is_sharded = sizes.get("vocab_size", 0), recipe.parallel.is_sharded(degrees)
    if degrees.is_known("shard", "context") and is_sharded and not aligns(rows, degrees):
        message = describe_misalignment("model.vocab_size", rows, degrees)
        yield path, message, f"{-(-rows // tensor) * tensor} would do"


def _tensor_sizes(recipe: Recipe) -> dict[str, int]:
    """Return the sizes of a model that tensor ranks divide, by key."""
    model: Any = recipe.model
    keys = ["n_heads", "n_kv_heads", "ffn_dim", "vocab_size"]
    # Experts are not divided over this axis, and then nothing may have this width.
    experts_of = getattr(model, "experts_of", None)
    if experts_of and all(map(experts_of, range(model.n_layers))):
        keys.remove("ffn_dim")
    return {key: size for key in keys if (size := getattr(model, key, None))}


def _uneven(sizes: Mapping[str, int], ranks: int) -> list[str]:
    """Return the keys of sizes that so many tensor ranks cannot share."""
    fits = {key: size % ranks == 0 for key, size in sizes.items()}
    if groups := sizes.get("n_kv_heads"):
        # More ranks than key-value heads are possible: several ranks then need the same head.
        fits["n_kv_heads"] |= ranks % groups == 0
    if rows := sizes.get("vocab_size"):
        # The last ranks may have fewer rows, as in torch.chunk, but not none.
        fits["vocab_size"] = -(-rows // ranks) * (ranks - 1) < rows
    return [key for key, fit in fits.items() if not fit]


def _overlap(recipe: Recipe) -> Iterator[Finding]:
    compiler = recipe.compile
    if recipe.parallel.async_tensor and not (compiler.enabled and compiler.backend == "inductor"):
        yield (
            ("parallel", "async_tensor"),
            "inductor overlaps products and collectives, and does not compile this run",
            "set compile.enabled = true, or leave async_tensor out",
        )

    float8 = recipe.precision.float8
    if recipe.parallel.async_tensor and float8.enabled and float8.gather_activations:
        yield (
            ("precision", "float8", "gather_activations"),
            "parallel.async_tensor overlaps gathers that products follow at once",
            "leave out one of the two",
        )


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _nearest(works: Collection[int], degree: int) -> str:
    below = max((n for n in works if n < degree), default=None)
    above = min((n for n in works if n > degree), default=None)
    return f"nearest that works: {' and '.join(str(n) for n in (below, above) if n)}"


def _sequence(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    """Yield a problem if the sequence does not divide over the ranks that share it.

    Context parallelism cuts it into two pieces a rank, and tensor parallelism cuts these again.
    """
    seq_len, unit = recipe.data.seq_len, degrees.sequence_pieces
    if seq_len % unit:
        axes = " and ".join(axis for axis in SEQUENCE_AXES if getattr(degrees, axis) > 1)
        message = f"seq_len ({seq_len}) is no multiple of {unit}, into which {axes} cut it"
        below, above = seq_len // unit * unit, (seq_len // unit + 1) * unit
        yield ("data", "seq_len"), message, f"{f'{below} or ' if below else ''}{above} would do"


def _rules(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    config, tensor = recipe.model.with_vocab(OPEN_VOCABULARY), degrees.known.tensor
    shapes = with_adapters(config, recipe.lora)
    shard = degrees.known.fsdp if recipe.parallel.fsdp.sharding.shards else 1
    has_plan = tensor > 1 and config.layout.tensor
    ranks = tensor if has_plan else 1
    yield from check_rules(
        shapes, recipe.parallel, lambda name: used_dim(name, config, ranks)[1], ranks, shard
    )
