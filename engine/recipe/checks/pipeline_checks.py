"""Whether a model and its rows can pass through a pipeline as a recipe says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ....model_zoo.matrices import is_adapter
from ...core.errors import RecipeError, nearest
from ...core.text.display import make_printable
from ...core.text.positions import KeyPath
from ...core.text.tree import Finding
from ...lora.sizes import with_adapters
from ...parallel.mesh import DATA_AXES, Degrees
from ...parallel.pipeline.cut import (
    SINGLE_STAGE_SCHEDULES,
    V_SCHEDULES,
    num_micro_batches,
    num_stages,
)
from ...parallel.pipeline.schedule_file import ScheduleFile, read_schedule
from ...parallel.tables import Pipelining
from ..schema import Recipe

PATH: KeyPath = ("parallel", "pipelining")


def check_pipeline(recipe: Recipe, degrees: Degrees) -> Iterator[Finding]:
    """Yield what does not fit `[parallel.pipelining]`; the model can be cut."""
    table, ranks = recipe.parallel.pipelining, degrees.pipeline
    if table.csv:
        try:
            file = read_schedule(Path(table.csv))
        except RecipeError as error:
            yield (*PATH, "csv"), error.problems[0].message, error.problems[0].hint
            return
        yield from _schedule_file(recipe, ranks, file)
        stages = len(file.stage_to_rank)
    else:
        file, stages = None, num_stages(table, ranks)
        yield from _stages_per_rank(table)
    yield from check_cut(recipe, ranks, stages)
    if recipe.lora.rank and (block := _block_without_adapter(recipe)):
        yield (
            ("lora", "targets"),
            f"a pipeline needs something to train in each stage: {block} has no adapter",
            "let a pattern match weights of every block",
        )
    if degrees.is_known(*DATA_AXES):
        yield from _micro_batches(recipe, degrees, stages, file)


def _block_without_adapter(recipe: Recipe) -> str:
    """Return the path of the first block that has none, or an empty string."""
    prefix, frozen = f"{recipe.model.layout.blocks}.", recipe.model.frozen_prefixes
    # Only the names are used, so any vocabulary will do.
    names = with_adapters(recipe.model.with_vocab(1), recipe.lora)
    has_adapter: dict[str, bool] = {}
    for name in names:
        if name.startswith(prefix) and not name.startswith(frozen):
            block = prefix + name.removeprefix(prefix).partition(".")[0]
            has_adapter[block] = has_adapter.get(block, False) or is_adapter(name)
    return next((block for block, has in has_adapter.items() if not has), "")


def _stages_per_rank(table: Pipelining) -> Iterator[Finding]:
    given, path = table.stages_per_rank, (*PATH, "stages_per_rank")
    if given > 1 and table.schedule in SINGLE_STAGE_SCHEDULES:
        yield (
            path,
            f'"{table.schedule}" has one stage a rank',
            'leave it out, or take "Interleaved1F1B"',
        )
    if given not in (0, 2) and table.schedule in V_SCHEDULES:
        yield path, f'"{table.schedule}" has two stages a rank', "leave it out"


def _schedule_file(recipe: Recipe, ranks: int, file: ScheduleFile) -> Iterator[Finding]:
    table = recipe.parallel.pipelining
    path: KeyPath = (*PATH, "csv")
    # The default itself cannot be told from a key that is not given.
    if table.schedule != Pipelining().schedule:
        yield path, f'schedule = "{table.schedule}" is given too', "keep one of them"
    if table.stages_per_rank:
        yield (
            (*PATH, "stages_per_rank"),
            "the file says which stages each rank holds",
            "leave it out",
        )
    if len(file.rows) != ranks:
        yield (
            path,
            f"the file has rows for {len(file.rows)} ranks, parallel.pipeline is {ranks}",
            f"set parallel.pipeline = {len(file.rows)}",
        )
    if recipe.model.shares_embedding and (late := file.late_gradient):
        yield (
            path,
            f"{late} comes after stage 0 has ended, and both have the weight of the embedding",
            "let it come before the last action of stage 0",
        )


def _micro_batches(
    recipe: Recipe, degrees: Degrees, stages: int, file: ScheduleFile | None
) -> Iterator[Finding]:
    table, ranks, data = recipe.parallel.pipelining, degrees.pipeline, recipe.data
    share = data.global_batch // degrees.data
    if share < 1:
        return
    count = num_micro_batches(table, data.micro_batch, share)
    path: KeyPath = (*PATH, "micro_batches")
    if share % count:
        yield path, f"{share} rows a rank do not make {count} micro batches", ""
    if file:
        if file.micro_batches != count:
            yield (
                path,
                f"the file has {file.micro_batches} micro batches, these are {count}",
                f"set micro_batches = {file.micro_batches}",
            )
        return
    # The limits of torch's schedules (torch 2.13, distributed/pipelining/schedules.py), which it
    # checks only once the processes run.
    least = {"1F1B": ranks, "DualPipeV": stages}.get(table.schedule, 1)
    rounds = max(1, count // ranks)
    if count < least:
        yield (
            path,
            f'"{table.schedule}" needs {least} micro batches or more, these are {count}',
            "lower data.micro_batch, or raise data.global_batch",
        )
    elif table.schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        yield (
            path,
            f'"{table.schedule}" cannot deal {count} micro batches to {ranks} ranks evenly',
            f"give a multiple of {ranks}",
        )


MOST_BLOCKS = 10_000


def check_cut(recipe: Recipe, ranks: int, stages: int) -> Iterator[Finding]:
    """Yield what is wrong with the cut of a model into so many stages."""
    table = recipe.parallel.pipelining
    sizes: Any = recipe.model
    layers, modules = table.layers_per_stage, table.modules_per_stage
    if layers and modules:
        yield (
            (*PATH, "modules_per_stage"),
            "the cut is given by layers_per_stage too",
            "keep one of them",
        )
    if (layers or modules) and table.cost == "measured":
        yield (*PATH, "cost"), "the cut is given: nothing is measured", "keep one of them"
    if layers and (len(layers) != stages or sum(layers) != sizes.n_layers):
        yield (
            (*PATH, "layers_per_stage"),
            (
                f"{len(layers)} stages of {sum(layers)} blocks; this plan has {stages} stages, the "
                f"model {sizes.n_layers} blocks"
            ),
            "leave it out for a balanced cut",
        )
    elif modules:
        yield from _modules(recipe, stages)
    elif stages > sizes.n_layers:
        yield (
            ("parallel", "pipeline"),
            f"{stages} stages are more than model.n_layers = {sizes.n_layers}",
            f"at most {sizes.n_layers // (stages // ranks)} ranks",
        )


def _modules(recipe: Recipe, stages: int) -> Iterator[Finding]:
    layout, sizes = recipe.model.layout, recipe.parallel.pipelining.modules_per_stage
    count: int = recipe.model.n_layers  # type: ignore[attr-defined]
    path: KeyPath = (*PATH, "modules_per_stage")
    if len(sizes) != stages:
        yield (
            path,
            f"{len(sizes)} stages are given, this plan has {stages}",
            "give as many lists, or other ranks, or stages_per_rank",
        )
    # Names of all blocks are listed below, and n_layers may be a typing error.
    if count > MOST_BLOCKS:
        yield (
            path,
            f"more than {MOST_BLOCKS:,} blocks are not cut by names",
            "give layers_per_stage",
        )
        return
    given = [name for names in sizes for name in names]
    order = [layout.embed, *(f"{layout.blocks}.{n}" for n in range(count)), layout.head]
    place = {name: number for number, name in enumerate(order)}
    shown = f"{order[0]}, {order[1]}, ..., {order[-1]}"
    for name in given:
        if name not in place:
            hint = nearest(name, order) or f"there are {shown}"
            yield path, f"the model has no {make_printable(repr(name))}", hint
    counts = Counter(given)
    for name, times in counts.items():
        if times > 1 and name in place:
            yield path, f"{name} is given {times} times", "a module is in one stage"
    if missing := [name for name in order if name not in counts]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield path, f"in no stage: {missing[0]}{more}", ""
    known = [name for name in given if name in place]
    for name, following in pairwise(known):
        if place[following] < place[name]:
            yield path, f"{name} stands before {following}", f"the order is {shown}"
            return
