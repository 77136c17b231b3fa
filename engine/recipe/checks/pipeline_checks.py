"""Whether a model and its rows can pass through a pipeline as a recipe says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ....model_zoo.layout import is_adapter
from ...core.errors import RecipeError
from ...core.text.positions import KeyPath
from ...lora.sizes import with_adapters
from ...parallel.pipeline.cut import (
    ONE_STAGE_A_RANK,
    SPLIT_BACKWARD,
    V_SHAPED,
    num_micro_batches,
    num_stages,
)
from ...parallel.pipeline.schedule_file import ScheduleFile, read_schedule
from ...parallel.tables import Pipelining
from ..schema import Recipe
from .cut_checks import check_cut

Finding = tuple[KeyPath, str, str]
"""key, message, hint"""

PATH: KeyPath = ("parallel", "pipelining")


def check_pipeline(recipe: Recipe, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """Yield what does not fit `[parallel.pipelining]`; the model can be cut."""
    table, ranks = recipe.parallel.pipelining, degrees["pipeline"]
    if table.csv:
        try:
            file = read_schedule(Path(table.csv))
        except RecipeError as error:
            yield (*PATH, "csv"), error.problems[0].message, error.problems[0].hint
            return
        yield from _schedule_file(recipe, ranks, file)
        stages, splits_backward = len(file.holders), file.splits_backward
    else:
        file, stages = None, num_stages(table, ranks)
        splits_backward = table.schedule in SPLIT_BACKWARD
        yield from _stages_per_rank(table)
    yield from check_cut(recipe, ranks, stages)
    if recipe.lora.rank and (block := _block_without_adapter(recipe)):
        message = f"a pipeline needs something to train in each stage: {block} has no adapter"
        yield ("lora", "targets"), message, "let a pattern match weights of every block"
    if recipe.compile.enabled and splits_backward:
        word = "the file" if table.csv else f'"{table.schedule}"'
        message = f"{word} splits the backward pass, and compiled blocks cannot"
        hint = 'take "1F1B" or "Interleaved1F1B", or do not compile'
        yield (*PATH, "csv" if table.csv else "schedule"), message, hint
    if {"replicate", "shard"} <= degrees.keys():
        yield from _micro_batches(recipe, degrees, stages, file)


def _block_without_adapter(recipe: Recipe) -> str:
    """Return the path of the first block that has none, or an empty string."""
    layout, prefix = recipe.model.layout, f"{recipe.model.layout.blocks}."
    shapes = recipe.model.with_vocab(1).parameter_shapes()
    has_adapter: dict[str, bool] = {}
    for name in with_adapters(shapes, layout, recipe.lora):
        if name.startswith(prefix):
            block = prefix + name.removeprefix(prefix).partition(".")[0]
            has_adapter[block] = has_adapter.get(block, False) or is_adapter(name)
    return next((block for block, has in has_adapter.items() if not has), "")


def _stages_per_rank(table: Pipelining) -> Iterator[Finding]:
    given, path = table.stages_per_rank, (*PATH, "stages_per_rank")
    if given > 1 and table.schedule in ONE_STAGE_A_RANK:
        message = f'"{table.schedule}" has one stage a rank'
        yield path, message, 'leave it out, or take "Interleaved1F1B"'
    if given not in (0, 2) and table.schedule in V_SHAPED:
        yield path, f'"{table.schedule}" has two stages a rank', "leave it out"


def _schedule_file(recipe: Recipe, ranks: int, file: ScheduleFile) -> Iterator[Finding]:
    table = recipe.parallel.pipelining
    path: KeyPath = (*PATH, "csv")
    if table.schedule != Pipelining().schedule:
        yield path, f'schedule = "{table.schedule}" is given too', "keep one of them"
    if table.stages_per_rank:
        message = "the file says which stages each rank holds"
        yield (*PATH, "stages_per_rank"), message, "leave it out"
    if len(file.rows) != ranks:
        message = f"the file has rows for {len(file.rows)} ranks, parallel.pipeline is {ranks}"
        yield path, message, f"set parallel.pipeline = {len(file.rows)}"
    if getattr(recipe.model, "tie_embeddings", False) and (late := file.late_gradient):
        message = f"{late} comes after stage 0 has ended, and both have one weight (tie_embeddings)"
        yield path, message, "let it come before the last action of stage 0"


def _micro_batches(
    recipe: Recipe, degrees: Mapping[str, int], stages: int, file: ScheduleFile | None
) -> Iterator[Finding]:
    table, ranks, data = recipe.parallel.pipelining, degrees["pipeline"], recipe.data
    share = data.global_batch // (degrees["replicate"] * degrees["shard"])
    if share < 1:
        return
    count = num_micro_batches(table, data.micro_batch, share)
    path: KeyPath = (*PATH, "micro_batches")
    if share % count:
        yield path, f"{share} rows a rank do not make {count} micro batches", ""
    if file:
        if file.micro_batches != count:
            message = f"the file has {file.micro_batches} micro batches, these are {count}"
            yield path, message, f"set micro_batches = {file.micro_batches}"
        return
    least = {"1F1B": ranks, "DualPipeV": stages}.get(table.schedule, 1)
    rounds = max(1, count // ranks)
    if count < least:
        message = f'"{table.schedule}" needs {least} micro batches or more, these are {count}'
        hint = "lower data.micro_batch, or raise data.global_batch"
        yield path, message, hint
    elif table.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        message = f'"{table.schedule}" cannot deal {count} micro batches to {ranks} ranks evenly'
        yield path, message, f"give a multiple of {ranks}"
