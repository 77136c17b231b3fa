"""One rank's steps of any run, without the other ranks, their memory or their data.

The code is the one that trains; tensors have shapes alone (FakeTensorMode), and collectives return
at once (torch's "fake" process group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ...kernels.cross_entropy.reference import GPU_ROWS
from ..assemble import BuiltModel, build_model, build_step
from ..data.batch import Batch
from ..parallel import data
from ..parallel.data import Parallelized
from ..parallel.materialize import materialize
from ..parallel.plan import Plan, make_plan
from ..recipe.tables import Compile
from .tracker import MemoryTracker

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel
    from ..loss.configs import LossFunction
    from ..recipe.schema import Recipe
    from ..train.step import TrainStep

CPU = torch.device("cpu")
STEPS = 2
"""the first has no optimizer state yet"""


@dataclass(frozen=True)
class Simulation:
    """What a rank's steps need.

    Attributes:
        rank: which.
        peak_bytes: most that tensors hold at a moment.
        at_peak: bytes then, by kind.
    """

    rank: int
    peak_bytes: int
    at_peak: dict[str, int]


def simulate(
    recipe: Recipe, rank: int, ranks: int, vocab_size: int, *, on_gpu: bool = False
) -> Simulation:
    """Return what a rank's steps need. A process may simulate one rank: torch remembers groups.

    Args:
        recipe: validated for that many ranks.
        rank: to be simulated.
        ranks: of the run.
        vocab_size: of the tokenizer.
        on_gpu: compute as a GPU would: in bf16 unless the recipe says otherwise, with fused
            attention and larger pieces of the loss.
    """
    with simulated_step(recipe, rank, ranks, vocab_size, on_gpu=on_gpu) as (recipe, step, plan):
        keeps_gradients = plan.degrees.copies > 1 and plan.mesh is None
        tracker = track(recipe, step, plan.take, keeps_gradients=keeps_gradients)
    found = {kind: size for kind, size in tracker.at_peak.items() if size}
    return Simulation(rank, tracker.peak, found)


@contextmanager
def simulated_step(
    recipe: Recipe, rank: int, ranks: int, vocab_size: int, *, on_gpu: bool = False
) -> Iterator[tuple[Recipe, TrainStep, Plan]]:
    """Give a rank's step, on tensors without content; see `simulate` for the arguments.

    Returns:
        the recipe as simulated, the step, and the plan.
    """
    recipe = _for_gpu(recipe) if on_gpu else recipe
    # Torch does not compile what is watched; compiled blocks hold less, not more.
    recipe = recipe.model_copy(update={"compile": Compile()})
    with _fake_ranks(rank, ranks), patch.object(data, "_replicate", _without_ddp):
        plan = make_plan(recipe.parallel, rank, ranks, CPU)
        # Outside of the fake mode: meshes look into tensors.
        built = build_model(recipe, vocab_size, CPU, plan)
        if on_gpu:
            built = _with_gpu_loss(built)
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialize(built.model, CPU, 0, fill=False)
            yield recipe, build_step(recipe, built, plan), plan


def track(
    recipe: Recipe,
    step: TrainStep,
    take: Callable[[Batch], Batch],
    *,
    keeps_gradients: bool = False,
) -> MemoryTracker:
    """Run a rank's steps, real or simulated, and return what was counted.

    Args:
        recipe: of the run.
        step: of this rank.
        take: what this rank computes of the rows that its group reads.
        keeps_gradients: memory for gradients is never given back, as under DDP.
    """
    table = recipe.data
    share = table.global_batch // step.degrees.data
    rows = share if step.parallelized.pipeline else min(table.micro_batch, share)
    parameters = [each for each in step.parallelized.model.parameters() if each.requires_grad]
    with MemoryTracker() as tracker:
        tracker.add(step.parallelized.model.parameters(), "parameters")
        tracker.add(step.parallelized.model.buffers(), "parameters")
        step.loss = _labelled(step.loss, tracker)
        for _ in range(STEPS):
            if keeps_gradients:
                with tracker.labelled("gradients"):
                    for parameter in parameters:
                        parameter.grad = torch.zeros_like(parameter)
            with tracker.labelled("batch"):
                batches = [take(each) for each in empty_batches(recipe, share, rows)]
            step.accumulate(batches)
            del batches
            with tracker.labelled("optimizer"):
                step.update(1.0)
            step.clear()
    return tracker


def _for_gpu(recipe: Recipe) -> Recipe:
    precision, kernels = recipe.precision, recipe.kernels
    if precision.compute == "auto":
        precision = precision.model_copy(update={"compute": "bf16"})
    if kernels.attention == "auto":
        kernels = kernels.model_copy(update={"attention": "sdpa"})
    return recipe.model_copy(update={"precision": precision, "kernels": kernels})


def _with_gpu_loss(built: BuiltModel) -> BuiltModel:
    # `is_split` keeps chunks whole, as on a GPU; a CPU's are cut to fit a core's cache.
    loss = partial(built.kernels.linear_cross_entropy, chunk=GPU_ROWS, is_split=True)
    return replace(built, kernels=replace(built.kernels, linear_cross_entropy=loss))


def _without_ddp(model: LanguageModel, device: torch.device, reduce: torch.dtype) -> Parallelized:
    """Return what DDP would, without its reducer, which looks into tensors."""
    del device, reduce
    return Parallelized(model, model, lambda last: None)


def _labelled(loss: LossFunction, tracker: MemoryTracker) -> LossFunction:
    def counted(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with tracker.labelled("logits and loss"):
            return loss(hidden, weight, labels)

    return counted


def empty_batches(recipe: Recipe, share: int, rows: int) -> list[Batch]:
    """Return the rows of a step, of no content."""
    batches = []
    for first in range(0, share, rows):
        shape = (min(rows, share - first), recipe.data.seq_len)
        tokens, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        positions = documents = None
        if recipe.data.packing == "documents":
            positions = torch.zeros(shape, dtype=torch.int64)
            documents = torch.zeros(shape, dtype=torch.int32)
        batches.append(Batch(tokens, labels, positions, documents))
    return batches


@contextmanager
def _fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Be one of so many ranks, the only one that exists."""
    if ranks == 1:
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
    """Spare pipelines a vote among ranks on whether all know the sizes of what they exchange."""
    from torch.distributed.pipelining import schedules, stage

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
