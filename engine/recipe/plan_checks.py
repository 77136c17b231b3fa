"""Whether a model and its data can be split as `[parallel]` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..parallel.cut import (
    ONE_STAGE_A_RANK,
    SPLIT_BACKWARD,
    V_SHAPED,
    num_micro_batches,
    num_stages,
)
from .positions import KeyPath
from .schema import Recipe

Finding = tuple[KeyPath, str, str]
"""key, message, hint"""


def check_plan(recipe: Recipe, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """Yield everything that does not fit the degrees.

    Args:
        recipe: tables that are each valid alone.
        degrees: those that are known, by axis.
    """
    tensor, context = degrees.get("tensor", 1), degrees.get("context", 1)
    if tensor > 1:
        yield from _tensor(recipe, tensor)
    yield from _sequence(recipe, tensor, context)
    if context > 1 and not recipe.model.layout.context:
        yield _no_plan(recipe, "context")
    if degrees.get("pipeline", 1) > 1:
        yield from _pipeline(recipe, degrees)


def _no_plan(recipe: Recipe, axis: str) -> Finding:
    message = f'the model "{recipe.model.name}" has no plan for this axis'
    return ("parallel", axis), message, f"keep parallel.{axis} = 1, and raise parallel.shard"


def _tensor(recipe: Recipe, tensor: int) -> Iterator[Finding]:
    path: KeyPath = ("parallel", "tensor")
    if not recipe.model.layout.tensor:
        yield _no_plan(recipe, "tensor")
        return
    sizes: Any = recipe.model
    for key in ("n_heads", "ffn_dim"):
        count = getattr(sizes, key, tensor)
        if count % tensor:
            yield (
                path,
                f"{tensor} ranks cannot share model.{key} = {count} evenly",
                _nearest(count, tensor),
            )
    groups = getattr(sizes, "n_kv_heads", tensor)
    if groups % tensor and tensor % groups:
        message = f"{tensor} ranks cannot share model.n_kv_heads = {groups} evenly"
        yield path, message, f"give a divisor or a multiple of {groups}"
    if recipe.lora.rank:
        yield path, "adapters ([lora]) are not split", "keep parallel.tensor = 1"


def _nearest(count: int, degree: int) -> str:
    works = [n for n in range(1, 2 * degree) if count % n == 0]
    return f"nearest degree that works: {min(works, key=lambda n: abs(n - degree))}"


def _sequence(recipe: Recipe, tensor: int, context: int) -> Iterator[Finding]:
    """Context parallelism cuts a sequence into 2 pieces a rank, tensor parallelism these again."""
    seq_len = recipe.data.seq_len
    unit = tensor * context * (2 if context > 1 else 1)
    if seq_len % unit:
        axes = " and ".join(n for n, d in (("context", context), ("tensor", tensor)) if d > 1)
        message = f"seq_len ({seq_len}) is no multiple of {unit}, into which {axes} cut it"
        below, above = seq_len // unit * unit, (seq_len // unit + 1) * unit
        yield ("data", "seq_len"), message, f"{f'{below} or ' if below else ''}{above} would do"


def _pipeline(recipe: Recipe, degrees: Mapping[str, int]) -> Iterator[Finding]:
    table, ranks = recipe.parallel.pipelining, degrees["pipeline"]
    sizes: Any = recipe.model
    if not sizes.layout.pipeline:
        yield _no_plan(recipe, "pipeline")
        return
    path: KeyPath = ("parallel", "pipelining")
    if getattr(sizes, "tie_embeddings", False):
        message = "the first and the last stage would share a weight (model.tie_embeddings)"
        yield ("parallel", "pipeline"), message, "untie them, or keep parallel.pipeline = 1"
    stages = num_stages(table, ranks)
    one = table.schedule in ONE_STAGE_A_RANK
    if table.stages_per_rank > 1 and one:
        message = f'"{table.schedule}" has one stage a rank'
        yield (*path, "stages_per_rank"), message, 'leave it out, or take "Interleaved1F1B"'
    if table.stages_per_rank not in (0, 2) and table.schedule in V_SHAPED:
        yield (
            (*path, "stages_per_rank"),
            f'"{table.schedule}" has two stages a rank',
            "leave it out",
        )
    given = table.layers_per_stage
    if given and (len(given) != stages or sum(given) != sizes.n_layers):
        message = (
            f"{len(given)} stages of {sum(given)} blocks; this plan has {stages} stages, the model "
            f"{sizes.n_layers} blocks"
        )
        yield (*path, "layers_per_stage"), message, "leave it out for a balanced cut"
    elif stages > sizes.n_layers:
        message = f"{stages} stages are more than model.n_layers = {sizes.n_layers}"
        hint = f"at most {sizes.n_layers // (stages // ranks)} ranks"
        yield ("parallel", "pipeline"), message, hint
    if recipe.lora.rank:
        message = "adapters ([lora]) are not cut into stages"
        yield ("parallel", "pipeline"), message, "keep parallel.pipeline = 1"
    if recipe.checkpoint.export != "none":
        message = "the stages of a pipeline do not export together"
        hint = "run trainer convert-ckpt dcp2hf afterwards"
        yield ("checkpoint", "export"), message, hint
    if recipe.compile.enabled and table.schedule in SPLIT_BACKWARD:
        message = f'"{table.schedule}" splits the backward pass, and compiled blocks cannot'
        yield (*path, "schedule"), message, 'take "1F1B" or "Interleaved1F1B", or do not compile'
    if {"replicate", "shard"} <= degrees.keys():
        yield from _micro_batches(recipe, degrees, stages)


def _micro_batches(recipe: Recipe, degrees: Mapping[str, int], stages: int) -> Iterator[Finding]:
    table, ranks, data = recipe.parallel.pipelining, degrees["pipeline"], recipe.data
    share = data.global_batch // (degrees["replicate"] * degrees["shard"])
    if share < 1:
        return
    count = num_micro_batches(table, data.micro_batch, share)
    path: KeyPath = ("parallel", "pipelining", "micro_batches")
    if share % count:
        yield path, f"{share} rows a rank do not make {count} micro batches", ""
    least = {"1F1B": ranks, "DualPipeV": stages}.get(table.schedule, 1)
    rounds = max(1, count // ranks)
    if count < least:
        message = f'"{table.schedule}" needs {least} micro batches or more, these are {count}'
        hint = "lower data.micro_batch, or raise data.global_batch"
        yield path, message, hint
    elif table.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        message = f'"{table.schedule}" cannot deal {count} micro batches to {ranks} ranks evenly'
        yield path, message, f"give a multiple of {ranks}"
