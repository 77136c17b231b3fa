"""One rank's steps of any run, without the other ranks, their memory or their data.

The code is the one that trains; tensors have shapes alone (FakeTensorMode), and collectives return
at once (torch's "fake" process group).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ...assemble.assemble import build_model, build_step
from ...core.errors import RecipeError
from ...core.local import local
from ...parallel.materialize import materialize
from ...parallel.pipeline.cut import SPLIT_BACKWARD, cut_blocks, num_micro_batches
from ...parallel.plan import Plan, make_plan
from ...parallel.tables import Compile
from ...precision.hardware import DTYPES
from ..gpu import for_gpu, with_gpu_kernels, with_torch_kernels
from .instrumented import track
from .shorten import (
    SHORTEST,
    are_alike,
    blocks_of,
    enough_micro_batches,
    extrapolate,
    with_blocks,
    with_micro_batches,
)
from .tracker import COMMUNICATION, RECEIVED, MemoryPeak

if TYPE_CHECKING:
    from ...recipe.schema import Recipe
    from ...train.step import TrainStep

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Simulation:
    """What a rank's steps need.

    Attributes:
        rank: which.
        peak_bytes: most that tensors hold at a moment, what is offloaded left out.
        at_peak: bytes then, by kind.
        block_bytes: of a block's weights as FSDP gathers them, and of their gradients before it
            reduces them; 0 without it.
    """

    rank: int
    peak_bytes: int
    at_peak: dict[str, int]
    block_bytes: int


def simulate(
    recipe: Recipe,
    rank: int,
    ranks: int,
    vocab_size: int,
    *,
    on_gpu: bool = False,
    whole: bool = False,
) -> Simulation:
    """Return what a rank's steps need. A process may simulate one rank: torch remembers groups.

    Where the blocks of a model are alike, two runs of a few blocks tell what many need; and no more
    micro batches are computed than show all that happens.

    Args:
        recipe: validated for that many ranks.
        rank: to be simulated.
        ranks: of the run.
        vocab_size: of the tokenizer.
        on_gpu: compute as a GPU would: in bf16 unless the recipe says otherwise, with fused
            attention and larger pieces of the loss.
        whole: compute all blocks and micro batches.
    """
    with _fake_ranks(rank, ranks):
        run = _Shortened(recipe, rank, ranks, vocab_size, on_gpu)
        peak = run.peak() if whole else run.shortened()
    kinds = peak.kinds
    kinds[COMMUNICATION] += kinds.pop(RECEIVED, 0)
    found = {kind: size for kind, size in sorted(kinds.items()) if size}
    return Simulation(rank, peak.total, found, run.block_bytes)


class _Shortened:
    """Runs of one rank, with fewer micro batches or blocks."""

    def __init__(
        self, recipe: Recipe, rank: int, ranks: int, vocab_size: int, on_gpu: bool
    ) -> None:
        self.recipe, self.rank, self.ranks = recipe, rank, ranks
        self.vocab_size, self.on_gpu = vocab_size, on_gpu
        self.degrees = recipe.parallel.degrees.resolve(ranks)
        share = recipe.data.global_batch // self.degrees.data
        table, rows = recipe.parallel.pipelining, min(recipe.data.micro_batch, share)
        if self.degrees.pipeline > 1:
            rows = share // num_micro_batches(table, recipe.data.micro_batch, share)
        self.rows, self.count = rows, share // rows
        self.block_bytes = 0

    def peak(self) -> MemoryPeak:
        """Return the peak of the whole run."""
        peaks = self._peaks(self.recipe, 0)
        return max(peaks.values(), key=lambda peak: peak.total)

    def shortened(self) -> MemoryPeak:
        """Return the same, found out faster where that is possible."""
        count = enough_micro_batches(self.recipe, self.degrees, self.rank, self.count)
        recipe, left = self.recipe, self.count - count
        if left:
            recipe = with_micro_batches(recipe, self.degrees, self.rows, count)
        if (steps := self._spare_blocks()) < 1:
            return max(self._peaks(recipe, left).values(), key=lambda peak: peak.total)
        counts = blocks_of(recipe, self.degrees, self.vocab_size)
        try:
            fewer = [[max(1, n - less) for n in counts] for less in (steps, steps + 1)]
            ends = [with_blocks(recipe, each) for each in fewer]
            if self._have(ends, fewer) and self._are_alike([recipe, *ends]):
                longer, shorter = (self._peaks(each, left) for each in ends)
                return extrapolate(longer, shorter, steps)
        except RecipeError:
            pass  # such as a pattern that names a block by its number
        return max(self._peaks(recipe, left).values(), key=lambda peak: peak.total)

    def _spare_blocks(self) -> int:
        """Return by how many blocks each stage may be shortened."""
        if not hasattr(self.recipe.model, "n_layers"):
            return 0
        counts, table = blocks_of(self.recipe, self.degrees, self.vocab_size), self.recipe.parallel
        if self.degrees.pipeline == 1:
            least = counts[0]
        elif table.pipelining.schedule in SPLIT_BACKWARD:
            return 0  # the pass over weights is not seen block by block
        else:
            model = self.recipe.model.with_vocab(self.vocab_size)
            cut = cut_blocks(table.pipelining, self.degrees.pipeline, model)
            place = self.degrees.coordinate(self.rank).pipeline
            least = min(counts[stage] for stage in cut.stages_of(place))
        spare = least - SHORTEST - 1
        return spare if spare * 2 >= SHORTEST else 0  # else nothing is won

    def _have(self, recipes: Sequence[Recipe], counts: Sequence[list[int]]) -> bool:
        """Return whether recipes cut as they were made to; another key may have its say."""
        return [blocks_of(each, self.degrees, self.vocab_size) for each in recipes] == counts

    def _are_alike(self, recipes: Sequence[Recipe]) -> bool:
        return are_alike(self.recipe, [build_model(r, self.vocab_size, CPU) for r in recipes])

    def _peaks(self, recipe: Recipe, left: int) -> dict[Any, MemoryPeak]:
        """Return the peak of each part of a step that is shorter by `left` micro batches."""
        with simulated_step(recipe, self.rank, self.ranks, self.vocab_size, on_gpu=self.on_gpu) as (
            recipe,
            step,
            plan,
        ):
            tracker = track(
                recipe,
                step,
                plan.take,
                owns_gradient_buffers=plan.degrees.dp_cp > 1 and plan.mesh is None,
                on_gpu=self.on_gpu,
                left=left * self.rows,
            )
            if recipe.parallel.uses_fsdp(plan.degrees):
                self.block_bytes = _gathered_bytes(recipe, step)
            more = tracker.live(RECEIVED) * left // (self.count - left)
            peaks = tracker.peaks()
        for peak in peaks.values():
            peak.kinds[RECEIVED] += more
        return {moment: replace(peak, total=peak.total + more) for moment, peak in peaks.items()}


def _gathered_bytes(recipe: Recipe, step: TrainStep) -> int:
    model, degrees = step.parallel_model.model, step.degrees
    blocks = model.get_submodule(recipe.model.layout.blocks).children()
    local_counts = [sum(local(each).numel() for each in block.parameters()) for block in blocks]
    sharded = degrees.fsdp if recipe.parallel.is_sharded(degrees) else 1
    width = model.compute_dtype.itemsize + DTYPES[recipe.precision.reduce].itemsize
    return max(local_counts) * sharded * width


@contextmanager
def simulated_step(
    recipe: Recipe,
    rank: int,
    ranks: int,
    vocab_size: int,
    *,
    on_gpu: bool = False,
    compiles: bool = False,
) -> Iterator[tuple[Recipe, TrainStep, Plan]]:
    """Give a rank's step, on tensors without content; see `simulate` for the arguments.

    Args:
        compiles: as the recipe says. A tracker needs blocks that are not compiled: torch compiles
            nothing that is watched. They hold more, not less.

    Returns:
        the recipe as simulated, the step, and the plan.
    """
    recipe = with_torch_kernels(for_gpu(recipe) if on_gpu else recipe)
    # No time passes here that could be measured.
    pipelining = recipe.parallel.pipelining.model_copy(update={"cost": "estimated"})
    changes: dict[str, Any] = {"pipelining": pipelining}
    if not compiles:
        changes["async_tensor"] = False
        recipe = recipe.model_copy(update={"compile": Compile()})
    recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=changes)})
    with _fake_ranks(rank, ranks):
        plan = make_plan(recipe.parallel, rank, ranks, CPU, is_simulated=True)
        # Outside of the fake mode: meshes look into tensors.
        built = build_model(recipe, vocab_size, CPU, plan)
        if on_gpu:
            built = with_gpu_kernels(built)
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialize(built.model, CPU, 0, fill=False)
            yield recipe, build_step(recipe, built, plan), plan


@contextmanager
def _fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Be one of so many ranks, the only one that exists."""
    if ranks == 1 or dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with _agreed_sizes():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _agreed_sizes() -> Iterator[None]:
    """Spare pipelines a vote among ranks on whether all know the sizes of what they exchange.

    And let 1F1B have fewer micro batches than stages, which is how many the last ones hold.
    """
    from torch.distributed.pipelining import schedules, stage

    unchecked = schedules.PipelineScheduleSingle.__init__
    with patch.object(schedules.Schedule1F1B, "__init__", unchecked):
        modes = getattr(stage, "InferenceMode", None)
        if modes is None:  # before torch 2.13
            yield
            return
        static = modes.STATIC

        def know_sizes(_: Any, stages: list[Any], *_rest: Any) -> None:
            for each in stages:
                each._inference_mode = static

        with patch.object(schedules._PipelineSchedule, "_warmup_p2p", know_sizes):
            yield
