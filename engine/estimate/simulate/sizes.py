"""Sizes of a run, and of the shorter runs that show everything that happens in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...assemble.build import build_model
from ...core.text.expressions import match_names
from ...parallel.blocks import transform_blocks
from ...parallel.mesh import Degrees
from ...parallel.pipeline.cut import assign_stages, cut_blocks, num_micro_batches
from ...parallel.pipeline.grid import parse, schedule_grid
from ...parallel.tables import Pipelining
from ...recipe.placements import placements
from ...recipe.schema import Recipe

ACCUMULATED = 3
"""micro batches that show all cases: the first creates gradients, the last reduces them"""


@dataclass(frozen=True)
class RunSize:
    """The sizes of a run that a shorter run changes.

    Attributes:
        degrees: the size of each axis of the mesh.
        stage_to_rank: the pipeline rank of each stage.
        blocks: the number of layers of each stage, without blocks that predict further tokens; 0
            where the model's config does not say.
        rows: the rows of a micro batch.
        micro_batches: the number of micro batches of a rank in a step.
    """

    degrees: Degrees
    stage_to_rank: tuple[int, ...]
    blocks: tuple[int, ...]
    rows: int
    micro_batches: int

    def stages_of(self, place: int) -> list[int]:
        """Return the stages of a pipeline rank."""
        return [stage for stage, rank in enumerate(self.stage_to_rank) if rank == place]

    @property
    def stages_per_rank(self) -> int:
        """The number of stages of a pipeline rank."""
        return len(self.stage_to_rank) // self.degrees.pipeline


def size_of(recipe: Recipe, ranks: int, vocab_size: int) -> RunSize:
    """Return the sizes of a recipe's run on `ranks` ranks."""
    degrees = recipe.parallel.degrees.resolve(ranks)
    share = recipe.data.global_batch // degrees.data
    if degrees.pipeline == 1:
        rows = min(recipe.data.micro_batch, share)
        num_blocks = int(getattr(recipe.model, "n_layers", 0))
        return RunSize(degrees, (0,), (num_blocks,), rows, share // rows)
    table = recipe.parallel.pipelining
    cut = cut_blocks(table, degrees.pipeline, recipe.model.with_vocab(vocab_size))
    blocks = tuple(len(cut.blocks(stage)) for stage in range(cut.stages))
    micro_batches = num_micro_batches(table, recipe.data.micro_batch, share)
    holders = assign_stages(table, degrees.pipeline)
    return RunSize(degrees, holders, blocks, share // micro_batches, micro_batches)


def resize(
    recipe: Recipe,
    size: RunSize,
    *,
    pipeline: int = 0,
    blocks: Sequence[int] = (),
    micro_batches: int = 0,
) -> Recipe:
    """Return a recipe for the same run with other sizes.

    Args:
        recipe: the recipe.
        size: the size of its run.
        pipeline: the number of pipeline ranks; 0: as before.
        blocks: the number of layers of each stage; empty: as before.
        micro_batches: the number of micro batches of a rank in a step; 0: as before.
    """
    model, data, pipelining = recipe.model, recipe.data, recipe.parallel.pipelining
    degrees = size.degrees.by_axis
    degrees["pipeline"] = pipeline or degrees["pipeline"]
    table: dict[str, Any] = {}
    if blocks:
        model = model.model_copy(update={"n_layers": sum(blocks)})
        table |= {"layers_per_stage": list(blocks), "modules_per_stage": []}
    if micro_batches:
        global_batch = size.rows * micro_batches * size.degrees.data
        data = data.model_copy(update={"micro_batch": size.rows, "global_batch": global_batch})
        table["micro_batches"] = micro_batches
    if degrees["pipeline"] > 1:
        pipelining = pipelining.model_copy(update=table)
    parallel = recipe.parallel.model_copy(update={**degrees, "pipelining": pipelining})
    return recipe.model_copy(update={"parallel": parallel, "data": data, "model": model})


def have_identical_blocks(recipes: Sequence[Recipe], degrees: Degrees, vocab_size: int) -> bool:
    """Return whether all blocks of the recipes' models store and compute the same.

    Modules, parameters, their groups in the optimizer and their placements are compared.
    """
    signatures: list[Any] = []
    for recipe in recipes:
        built = build_model(recipe, vocab_size, torch.device("cpu"))
        layout = built.config.layout
        transform_blocks(built.model, layout, recipe.memory, None)
        groups = [match_names(group.match) for group in recipe.optimizer.groups]
        places = {each.name: each.place for each in placements(recipe, degrees, vocab_size)}
        for number, block in built.model.get_submodule(layout.blocks).named_children():
            prefix = f"{layout.blocks}.{number}."
            weights = [
                (name, weight.shape, weight.dtype, weight.requires_grad, places.get(prefix + name),
                 [matches(prefix + name) for matches in groups])
                for name, weight in block.named_parameters()
            ]  # fmt: skip
            signatures.append([*_modules(block), *weights])
    return all(signature == signatures[0] for signature in signatures)


def _modules(block: nn.Module) -> Iterator[Any]:
    machinery = vars(nn.Module()).keys()
    for name, module in block.named_modules():
        values = {k: _comparable(v) for k, v in vars(module).items() if k not in machinery}
        yield name, type(module), values


def _comparable(value: Any) -> Any:
    """Return a value that is equal where an attribute makes modules compute the same."""
    if isinstance(value, partial):
        return value.func, [_comparable(argument) for argument in value.args], value.keywords
    if isinstance(value, MethodType):
        return value.__func__
    if isinstance(value, FunctionType):
        return value.__code__, [_comparable(c.cell_contents) for c in value.__closure__ or ()]
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return value


def enough_micro_batches(table: Pipelining, size: RunSize, place: int) -> int:
    """Return the smallest number of micro batches that shows all states of a pipeline rank."""
    pipeline, count = size.degrees.pipeline, size.micro_batches
    if pipeline == 1:
        return min(count, ACCUMULATED)
    if table.csv:
        return count
    if table.schedule == "1F1B":
        return min(count, max(ACCUMULATED, pipeline - place + 1))
    wanted = _states(table.schedule, size, count, place)
    for fewer in range(pipeline, count if wanted else 0):
        if wanted == _states(table.schedule, size, fewer, place):
            return fewer
    return count


def _states(schedule: str, size: RunSize, count: int, place: int) -> set[Hashable] | None:
    """Return the states of a rank in a step: each action with the micro batches then in flight.

    The result is None if the schedule does not accept this number of micro batches.
    """
    try:
        grid = schedule_grid(schedule, size.degrees.pipeline, len(size.stage_to_rank), count)
    except (ValueError, AssertionError):
        return None
    done: Counter[tuple[int, str]] = Counter()
    states: set[Hashable] = set()
    for action in (parse(cell) for cell in grid[place] if cell):
        if action:
            key = action.stage, action.kind
            done[key] += 1
            held = tuple((stage, *_held(done, stage)) for stage in sorted({s for s, _ in done}))
            states.add((key, held, done[key] == count))
    return states


def _held(done: Counter[tuple[int, str]], stage: int) -> tuple[int, int, bool]:
    """Return the micro batches with live activations, those with pending weight gradients, and
    whether weight gradients exist.
    """
    forward, backward, inputs, weights = (done[stage, kind] for kind in "FBIW")
    return forward - backward - inputs, inputs - weights, backward + weights > 0
