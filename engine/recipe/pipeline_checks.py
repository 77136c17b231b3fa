"""Whether a model and its rows can pass through a pipeline as a recipe says."""

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


def check_pipeline(recipe: Recipe, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """Yield what does not fit `[parallel.pipelining]`; the model can be cut."""
    table, ranks = recipe.parallel.pipelining, degrees["pipeline"]
    sizes: Any = recipe.model
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
