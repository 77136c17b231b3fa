"""Whether `[precision]`, `[memory]` and `[compile]` fit the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.errors import nearest
from ...core.text.positions import KeyPath
from ...core.text.tree import Finding
from ...parallel.mesh import DATA_AXES, SEQUENCE_AXES, Degrees
from ...parallel.tables import FULL_NAME, WORDS
from ...precision.choose import mismatches, required_multiple, select_weights
from ...precision.tables import MX
from ..schema import Recipe


def check_precision(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    """Yield everything that does not fit the formats.

    Args:
        recipe: tables that are each valid alone.
        degrees: the degree of each axis; -1 for one that is not known yet.
    """
    tables = recipe.precision.low_precision
    if not tables:
        return
    # Low precision is for weights of blocks, so any vocabulary will do.
    config = recipe.model.with_vocab(1)
    if not (config.parameter_shapes() and config.layout.blocks):
        message = f'the model "{config.name}" does not say which weights its blocks have'
        for word in tables:
            yield ("precision", word, "enabled"), message, "set it to false"
        return
    # A layout without a tensor plan is not split, and `check_plan` reports the degree.
    tensor = max(1, degrees.known.tensor) if config.layout.tensor else 1
    for word, table in tables.items():
        for key, message, hint in mismatches(table, config, tensor, recipe.parallel.expert_tensor):
            yield ("precision", word, *key), message, hint
    twice = set.intersection(*(set(select_weights(table, config)) for table in tables.values()))
    if len(tables) > 1 and twice:
        yield (
            ("precision", "mx", "targets"),
            f"{min(twice)} is to multiply in float8 already",
            "exclude it from one of the two",
        )
    yield from _dtype(recipe)
    yield from _tokens(recipe, degrees)


def _dtype(recipe: Recipe) -> Iterator[Finding]:
    compute = recipe.precision.compute
    emulated = all(table.emulate for table in recipe.precision.low_precision.values())
    if compute == "fp16" or (compute == "fp32" and not emulated):
        words = " and ".join(recipe.precision.low_precision)
        yield (
            ("precision", "compute"),
            f'products in {words} are given back in bf16, not "{compute}"',
            'take "bf16", or leave it to "auto"',
        )


def _tokens(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    """Yield a problem if a rank's tokens do not divide into the blocks of the low precision format.

    The gradient of a weight is a product that sums over tokens, in whole blocks.
    """
    # Along the tensor axis experts alone see a part of the sequence.
    axes = [name for name in SEQUENCE_AXES if name != "tensor" or recipe.model.layout.experts]
    ranks = max(1, degrees.known.product(axes))
    tokens = recipe.data.seq_len // ranks
    for word, table in recipe.precision.low_precision.items():
        if tokens % required_multiple(table) == 0 or (table.emulate and not isinstance(table, MX)):
            continue
        where = f" on each of {ranks} ranks" if ranks > 1 else ""
        message = (
            f"rows of {tokens} tokens{where} are no multiple of {required_multiple(table)}, which "
        )
        message += f"precision.{word} sums over"
        yield ("data", "seq_len"), message, f"give a multiple of {required_multiple(table) * ranks}"


PARTITIONS = ("inductor", "aot_eager", "aot_eager_decomp_partition")
"""backends that decide what a compiled block keeps for its backward pass"""


def check_memory(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    """Yield everything that does not fit.

    Args:
        recipe: tables that are each valid alone.
        degrees: the degree of each axis; -1 for one that is not known yet.
    """
    yield from _recompute(recipe)
    if recipe.memory.optimizer_in_backward:
        path = ("memory", "optimizer_in_backward")
        for message, hint in _optimizer_in_backward(recipe, degrees):
            yield path, message, hint


def _recompute(recipe: Recipe) -> Iterator[Finding]:
    memory, compile_ = recipe.memory, recipe.compile
    path: KeyPath = ("memory", "recompute")
    for index, word in enumerate(memory.recompute_keep):
        if word not in WORDS and not FULL_NAME.fullmatch(word):
            hint = nearest(word, WORDS) or f"known: {', '.join(WORDS)}, or as aten.mm.default"
            yield ("memory", "recompute_keep", index), f'no operations are called "{word}"', hint
    if memory.recompute != "budget":
        return
    if not compile_.enabled:
        yield (
            path,
            'it is torch.compile that keeps to a "budget"',
            'set compile.enabled = true, or take "selective"',
        )
    elif compile_.backend not in PARTITIONS:
        yield (
            path,
            f'the backend "{compile_.backend}" does not choose what is kept',
            'take compile.backend = "inductor"',
        )


def _optimizer_in_backward(recipe: Recipe, degrees: Degrees) -> Iterator[tuple[str, str]]:
    """Yield why the optimizer cannot step during the backward pass, each with a way out."""
    if recipe.optimizer.clip_norm:
        yield (
            "weights change before the norm of all gradients is known, by which they are clipped",
            "set optimizer.clip_norm = 0",
        )
    for key, other in {"non_finite": "stop", "spike": "warn"}.items():
        if getattr(recipe.resilience, key) == "skip":
            yield (
                f'a step that has changed weights cannot be skipped (resilience.{key} = "skip")',
                f'take "rollback" or "{other}"',
            )
    if recipe.precision.compute == "fp16":
        yield "steps that overflow in fp16 are skipped", 'take precision.compute = "bf16"'
    if recipe.metrics.monitors:
        yield "monitors need the gradients and weights of a whole step", "remove metrics.monitors"
    if degrees.known.pipeline > 1:
        yield (
            "a stage holds all gradients before its last backward pass, so that nothing is saved",
            "keep parallel.pipeline = 1",
        )
    yield from _copies(recipe, degrees)


def _copies(recipe: Recipe, degrees: Degrees) -> Iterator[tuple[str, str]]:
    if not degrees.is_known(*DATA_AXES):
        return
    known = degrees.known
    if known.dp_cp > 1 and not recipe.parallel.uses_fsdp(known):
        shards = recipe.parallel.fsdp.sharding.shards
        hint = "raise parallel.shard" if shards else 'take "full_shard"'
        yield "copies (DDP) hold whole gradients until all are reduced", hint
