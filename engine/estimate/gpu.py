"""What a GPU computes otherwise than a CPU, where memory shows it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.cross_entropy.reference import GPU_ROWS
from ...model_zoo.layers.dense import RMSNorm

if TYPE_CHECKING:
    from ..assemble.assemble import BuiltModel
    from ..recipe.schema import Recipe


def for_gpu(recipe: Recipe) -> Recipe:
    """Return a recipe whose "auto" is what it would be on a GPU."""
    precision, kernels = recipe.precision, recipe.kernels
    if precision.compute == "auto":
        precision = precision.model_copy(update={"compute": "bf16"})
    if kernels.attention == "auto":
        kernels = kernels.model_copy(update={"attention": "sdpa"})
    return recipe.model_copy(update={"precision": precision, "kernels": kernels})


def with_torch_kernels(recipe: Recipe) -> Recipe:
    """Return a recipe with torch's kernels in place of Triton's, compiled ones and plugins'.

    Torch's keep the same tensors for the backward pass, and run without a GPU and without data.

    MX is emulated: that keeps the same for the backward pass, and widens operands for a moment.
    """
    given = recipe.kernels.model_dump()
    words = {
        key: "sdpa" if key == "attention" else "torch"
        for key, word in given.items()
        if word not in ("auto", "torch", "matmul", "sdpa")
    }
    mx = recipe.precision.mx.model_copy(update={"emulate": True})
    update = {
        "kernels": recipe.kernels.model_copy(update=words),
        "precision": recipe.precision.model_copy(update={"mx": mx}),
    }
    return recipe.model_copy(update=update)


def with_gpu_kernels(built: BuiltModel) -> BuiltModel:
    """Return a model, to be simulated, that holds what a GPU's kernels would."""
    for module in built.model.modules():
        if isinstance(module, RMSNorm):
            module.kernel = _fused_norm
    # `is_split` keeps chunks whole, as on a GPU; a CPU's are cut to fit a core's cache.
    loss = partial(built.kernels.linear_cross_entropy, chunk=GPU_ROWS, is_split=True)
    return replace(built, kernels=replace(built.kernels, linear_cross_entropy=loss))


def _fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    found: Tensor = _FusedNorm.apply(x, weight.to(x.dtype), eps)  # type: ignore[no-untyped-call]
    return found


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
