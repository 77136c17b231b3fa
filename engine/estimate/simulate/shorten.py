"""Shorter runs whose peak is, or tells, that of a long one: fewer micro batches, fewer blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...optim.groups import matcher
from ...parallel.blocks import transform_blocks
from ...parallel.pipeline.cut import cut_blocks, num_stages
from ...parallel.tables import Compile
from .tracker import MemoryPeak

if TYPE_CHECKING:
    from ...assemble.assemble import BuiltModel
    from ...parallel.mesh import Degrees
    from ...recipe.schema import Recipe

SHORTEST = 3
"""blocks of the shorter of two runs: a first one, a last one, and one that is neither"""
ACCUMULATED = 3
"""micro batches one after another: the first makes gradients, the last reduces them"""


@dataclass(frozen=True)
class StageCoordinate:
    """A part of a step: the forward or backward pass of a block and what follows it.

    Attributes:
        what: which pass.
        stage: of a pipeline.
        number: of the micro batch.
        block: of the stage, from 0.
        blocks: that the stage has.
    """

    what: str
    stage: int
    number: int
    block: int
    blocks: int

    def aligned(self) -> Iterator[Hashable]:
        """Yield what it is called in runs of any number of blocks."""
        end = self.blocks - 1 - self.block
        if self.block < SHORTEST - 1:
            yield "from start", self.what, self.stage, self.number, self.block
        if end < SHORTEST - 1:
            yield "from end", self.what, self.stage, self.number, end


def extrapolate(
    longer: Mapping[Any, MemoryPeak], shorter: Mapping[Any, MemoryPeak], steps: int
) -> MemoryPeak:
    """Return the peak of a run that has more blocks.

    At a given moment of a step, counted in blocks from where its stage starts or ends, each
    block more holds the same bytes more. So the peaks of the moments grow along straight lines,
    and the highest of these lines is the peak. Between two ends a moment is never above both.

    Args:
        longer: peaks of a run by moment.
        shorter: of one with one block less in each stage.
        steps: by how many blocks the run asked for is longer than the longer one.
    """
    ends = _aligned(longer), _aligned(shorter)
    found = [
        MemoryPeak(
            peak.total + steps * (peak.total - ends[1][moment].total),
            _line(peak.kinds, ends[1][moment].kinds, steps),
        )
        for moment, peak in ends[0].items()
    ]
    return max(found, key=lambda peak: peak.total)


def _aligned(peaks: Mapping[Any, MemoryPeak]) -> dict[Hashable, MemoryPeak]:
    found: dict[Hashable, MemoryPeak] = {}
    for segment, peak in peaks.items():
        moments = segment.aligned() if isinstance(segment, StageCoordinate) else (segment,)
        found |= dict.fromkeys(moments, peak)
    return found


def _line(at: Counter[str], before: Counter[str], steps: int) -> Counter[str]:
    return Counter({kind: at[kind] + steps * (at[kind] - before[kind]) for kind in {*at, *before}})


def blocks_of(recipe: Recipe, degrees: Degrees, vocab_size: int) -> list[int]:
    """Return how many blocks each stage of a pipeline has."""
    if degrees.pipeline == 1:
        return [recipe.model.n_layers]  # type: ignore[attr-defined]
    cut = cut_blocks(
        recipe.parallel.pipelining, degrees.pipeline, recipe.model.with_vocab(vocab_size)
    )
    return [len(cut.blocks(stage)) for stage in range(cut.stages)]


def with_blocks(recipe: Recipe, counts: Sequence[int]) -> Recipe:
    """Return a recipe whose stages have so many blocks."""
    model = recipe.model.model_copy(update={"n_layers": sum(counts)})
    parallel = recipe.parallel
    if len(counts) > 1:
        pipelining = parallel.pipelining.model_copy(update={"layers_per_stage": list(counts)})
        parallel = parallel.model_copy(update={"pipelining": pipelining})
    return recipe.model_copy(update={"model": model, "parallel": parallel})


def are_alike(recipe: Recipe, built: Sequence[BuiltModel]) -> bool:
    """Return whether all blocks of models hold and compute the same.

    Args:
        recipe: says which blocks recompute, and how parameters are grouped.
        built: models on `meta`, whole.
    """
    found: list[Any] = []
    for each in built:
        layout = each.config.layout
        transform_blocks(each.model, layout, recipe.memory, Compile())
        for number, block in each.model.get_submodule(layout.blocks).named_children():
            prefix = f"{layout.blocks}.{number}."
            found.append([*_parts(block), *_weights(block, prefix, recipe)])
    return all(each == found[0] for each in found)


def _parts(block: nn.Module) -> Iterator[Any]:
    machinery = vars(nn.Module()).keys()
    for name, module in block.named_modules():
        values = {k: _value(v) for k, v in vars(module).items() if k not in machinery}
        yield name, type(module), values


def _value(value: Any) -> Any:
    """Return what tells values apart that make blocks differ."""
    if isinstance(value, partial):
        return value.func, [_value(each) for each in value.args], value.keywords
    if isinstance(value, MethodType):
        return value.__func__
    if isinstance(value, FunctionType):
        return value.__code__, [_value(cell.cell_contents) for cell in value.__closure__ or ()]
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return value


def _weights(block: nn.Module, prefix: str, recipe: Recipe) -> Iterator[Any]:
    groups = [matcher(group.match) for group in recipe.optimizer.groups]
    for name, weight in block.named_parameters():
        group = [matches(prefix + name) for matches in groups]
        yield name, weight.shape, weight.dtype, weight.requires_grad, group


def enough_micro_batches(recipe: Recipe, degrees: Degrees, rank: int, count: int) -> int:
    """Return how many micro batches show everything that happens in a step of `count`."""
    if degrees.pipeline == 1:
        return min(count, ACCUMULATED)
    table = recipe.parallel.pipelining
    place = degrees.coordinate(rank).pipeline
    each = num_stages(table, degrees.pipeline) // degrees.pipeline
    if table.schedule == "1F1B":
        return min(count, max(ACCUMULATED, degrees.pipeline - place + 1))
    wanted = _moments(table.schedule, degrees.pipeline, each, count, place)
    for fewer in range(degrees.pipeline, count if wanted else 0):
        if wanted == _moments(table.schedule, degrees.pipeline, each, fewer, place):
            return fewer
    return count


def _moments(schedule: str, ranks: int, each: int, count: int, place: int) -> set[Hashable] | None:
    """Return all states that a rank passes through: what it does, and what it holds meanwhile."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        ops = get_schedule_ops(schedule, ranks, count, num_stages_per_rank=each)[place]
    except (ValueError, AssertionError):  # a schedule that wants more, or another multiple
        return None
    done: Counter[tuple[int, str]] = Counter()
    found: set[Hashable] = set()
    for op in ops:
        if op is None:
            continue
        key = op.stage_index, op.computation_type.name
        done[key] += 1
        stages = {stage for stage, _ in done}
        held = tuple(sorted((stage, *_held(done, stage)) for stage in stages))
        found.add((key, held, done[key] == count))
    return found


def _held(done: Counter[tuple[int, str]], stage: int) -> tuple[int, int, bool]:
    """Return for how many micro batches a stage holds activations, and gradients of weights."""
    names = "FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"
    forward, backward, inputs, weights = (done[stage, name] for name in names)
    return forward - backward - inputs, inputs - weights, backward + weights > 0


def with_micro_batches(recipe: Recipe, degrees: Degrees, rows: int, count: int) -> Recipe:
    """Return a recipe whose step has so many micro batches of `rows` rows."""
    update: dict[str, Any] = {"global_batch": rows * count * degrees.data, "micro_batch": rows}
    parallel = recipe.parallel
    if parallel.pipelining.micro_batches:
        pipelining = parallel.pipelining.model_copy(update={"micro_batches": count})
        parallel = parallel.model_copy(update={"pipelining": pipelining})
    return recipe.model_copy(
        update={"data": recipe.data.model_copy(update=update), "parallel": parallel}
    )
