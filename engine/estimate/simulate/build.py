"""Builds one rank's training step of any run, without devices, other ranks or data.

The code is the one that trains. Its tensors have shapes alone (`FakeTensorMode`), and collectives
return at once (PyTorch's "fake" process group).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels.cross_entropy.op import replace_by_gradient
from ....kernels.cross_entropy.reference import GPU_ROWS, linear_cross_entropy
from ....kernels.rms_norm.reference import zero_centered_rms_norm
from ....kernels.torch_private import FakeTensorMode
from ....model_zoo.layers.dense import RMSNorm
from ...assemble.build import BuiltModel, build_model, build_step
from ...assemble.frozen import build_frozen
from ...data.batch import Batch
from ...data.tables import Data
from ...parallel.materialize import materialize
from ...parallel.plan import Plan, make_plan
from ...parallel.tables import Compile
from ...recipe.schema import Recipe
from ...tasks.task import Task
from ...train.step import TrainStep
from .torch_internals import fake_process_group

CPU = torch.device("cpu")


class SimulatedRank(NamedTuple):
    """One simulated rank of a run whose other ranks do not exist.

    Attributes:
        recipe: the recipe as simulated.
        step: the rank's training step.
        plan: the rank's share of the run.
    """

    recipe: Recipe
    step: TrainStep
    plan: Plan


@contextmanager
def simulate_rank(
    recipe: Recipe,
    rank: int,
    ranks: int,
    vocab_size: int,
    *,
    on_gpu: bool = False,
    compiles: bool = False,
) -> Iterator[SimulatedRank]:
    """Build the training step of one rank on fake tensors.

    Args:
        recipe: the recipe, validated for that many ranks.
        rank: the rank to build.
        ranks: the world size.
        vocab_size: the tokenizer's vocabulary size.
        on_gpu: compute as a GPU would: in bf16 unless the recipe says otherwise, with fused
            attention and norms, and with larger pieces of the loss.
        compiles: compile what the recipe compiles. A `MemoryTracker` needs blocks that are not
            compiled, since PyTorch compiles nothing under a dispatch mode; they hold more memory,
            never less.
    """
    recipe = _adapt(recipe, on_gpu=on_gpu, compiles=compiles)
    with fake_process_group(rank, ranks):
        plan = make_plan(recipe.parallel, rank, ranks, CPU, is_simulated=True)
        # Outside of the fake mode, because meshes read the values of tensors.
        built = build_model(recipe, vocab_size, CPU, plan)
        frozen = build_frozen(recipe, vocab_size, "", CPU, plan)
        if on_gpu:
            built = with_gpu_kernels(built)
            if frozen:
                with_gpu_kernels(frozen.built)
        with FakeTensorMode(allow_non_fake_inputs=True):
            materialize(built.model, CPU, 0, fill=False)
            if frozen:
                frozen.materialize(CPU, fill=False)
            wrapped = frozen.wrap() if frozen else None
            yield SimulatedRank(recipe, build_step(recipe, built, plan, frozen=wrapped), plan)


def _adapt(recipe: Recipe, *, on_gpu: bool, compiles: bool) -> Recipe:
    """Return a recipe that runs here and holds the same memory as the given one.

    PyTorch's kernels replace Triton's, compiled ones and plugins', and save the same tensors for
    the backward pass. MX is emulated, which saves the same and widens operands only for a moment.
    """
    precision, kernels, parallel = recipe.precision, recipe.kernels, recipe.parallel
    words = {
        operation: REPLACEMENTS.get(operation, "torch")
        for operation, word in kernels.model_dump().items()
        if word not in AVAILABLE
    }
    casts: dict[str, Any] = {"mx": precision.mx.model_copy(update={"emulate": True})}
    if on_gpu and kernels.attention == "auto":
        words["attention"] = "sdpa"
    if on_gpu and precision.compute == "auto":
        casts["compute"] = "bf16"
    # Nothing takes time here, so that costs of stages cannot be measured.
    axes: dict[str, Any] = {
        "pipelining": parallel.pipelining.model_copy(update={"cost": "estimated"})
    }
    if not compiles:
        axes["async_tensor"] = False
    # Others hold little, and a plugin's may need the values of tensors.
    monitors = [monitor for monitor in recipe.metrics.monitors if monitor.copies_weights]
    return recipe.model_copy(
        update={
            "metrics": recipe.metrics.model_copy(update={"monitors": monitors}),
            "optimizer": recipe.optimizer.for_gpu() if on_gpu else recipe.optimizer,
            "kernels": kernels.model_copy(update=words),
            "precision": precision.model_copy(update=casts),
            "parallel": parallel.model_copy(update=axes),
            "compile": recipe.compile if compiles else Compile(),
        }
    )


AVAILABLE = ("auto", "torch", "matmul", "sdpa", "blocks")
"""implementations of kernels that run without a GPU and without values"""
REPLACEMENTS = {"attention": "sdpa", "ragged_attention": "blocks", "linear_cross_entropy": "auto"}
"""what replaces other implementations of an operation, where it is not "torch" """


def with_gpu_kernels(built: BuiltModel) -> BuiltModel:
    """Return a model whose operations hold what the kernels of a GPU would hold."""
    for module in built.model.modules():
        # A norm over all heads that tensor ranks share is left: it sums squares over them.
        if not isinstance(module, RMSNorm):
            continue
        if module.kernel is built.kernels.rms_norm:
            module.kernel = _fused_norm
        elif getattr(module.kernel, "func", None) is zero_centered_rms_norm:
            module.kernel = partial(zero_centered_rms_norm, _fused_norm)
    # `is_split` keeps chunks whole, as on a GPU; a CPU's are cut to fit a core's cache.
    loss = partial(built.kernels.linear_cross_entropy, chunk=GPU_ROWS, is_split=True)
    is_requested = built.kernels.reasons["linear_cross_entropy"] == "torch: requested"
    if loss.func is linear_cross_entropy and not is_requested:
        # One kernel, Triton's or a compiled one: it holds nothing beside the logits.
        loss = partial(loss, inner=replace_by_gradient)
    return replace(built, kernels=replace(built.kernels, linear_cross_entropy=loss))


def _fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _FusedNorm.apply(x, weight.to(x.dtype), eps)  # type: ignore[no-any-return, no-untyped-call]


class _FusedNorm(torch.autograd.Function):
    """Holds what `aten._fused_rms_norm` does on CUDA; on a CPU it is made of parts in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, _eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


def samples_of(data: Data, step: TrainStep) -> tuple[int, int]:
    """Return a rank's samples of a step, and of a batch; a pipeline takes all in one batch."""
    share = data.global_batch // step.degrees.data
    return share, share if step.parallel_model.pipeline else min(data.micro_batch, share)


def empty_batches(task: Task[Any], share: int, size: int) -> list[Batch]:
    """Return batches of zeros with the shapes of a step's batches.

    Args:
        task: what is learned.
        share: the samples of all batches together.
        size: the samples of one batch; the last one may have fewer.
    """
    return [task.example(min(size, share - first)) for first in range(0, share, size)]


def step_batches(data: Data, step: TrainStep, plan: Plan) -> list[Batch]:
    """Return batches of zeros with the shapes that a rank computes in a step."""
    model = step.parallel_model.model
    batches = empty_batches(step.task, *samples_of(data, step))
    return [plan.take(batch, model) for batch in batches]
