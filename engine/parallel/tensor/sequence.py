"""The residual stream along the sequence: gathered for the features of a rank, and scattered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ....model_zoo.layers.dense import AdaptedLinear
from ..collectives import all_gather, all_reduce, all_reduce_no_grad, reduce_scatter
from .float8_gather import all_gather_float8

SEQUENCE = 1


def _all_gather_sequence(
    _module: nn.Module, _args: Any, out: Tensor, group: ProcessGroup
) -> Tensor:
    # The backward pass, a reduce-scatter, also sums the input gradients of the split matmuls.
    return all_gather(out, SEQUENCE, group)


def all_gather_float8_sequence(
    _module: nn.Module, _args: Any, out: Tensor, group: ProcessGroup
) -> Tensor:
    """Gather the sequence of a norm's output in float8, as `_all_gather_sequence` otherwise."""
    return all_gather_float8(out, SEQUENCE, group)


def all_gather_input(
    _module: nn.Module, inputs: tuple[Any, ...], group: ProcessGroup, in_float8: bool
) -> tuple[Any, ...]:
    """Gather the sequence of a module's first input, before the module is called."""
    x, *others = inputs
    gather = all_gather_float8 if in_float8 else all_gather
    return gather(x, SEQUENCE, group), *others


def _reduce_scatter_sequence(
    _module: nn.Module, _args: Any, out: Tensor, group: ProcessGroup
) -> Tensor:
    # With the next all-gather this costs as much as an all-reduce; norms between compute a part.
    return reduce_scatter(out, SEQUENCE, group)


def _share_gradient(_module: nn.Module, _args: Any, out: Tensor, group: ProcessGroup) -> Tensor:
    # All ranks compute the same outputs and the same loss. Gradients of replicated weights, and of
    # the sequence that was gathered before, are summed over the ranks: each rank gives its share.
    if out.requires_grad:
        out.register_hook(lambda grad: grad / group.size())  # type: ignore[no-untyped-call]
    return out


HOOKS: dict[str, Callable[..., Tensor]] = {
    "norm": _all_gather_sequence,
    "rows": _reduce_scatter_sequence,
    "vocabulary": _reduce_scatter_sequence,
    "repeated": _share_gradient,
}
"""style of `Layout.tensor` -> the collective that is applied to a module's output"""


SPLIT_NORMS = ("columns", "key_value")
"""styles of a norm over all heads, of which a rank has some"""


def rms_norm_over_ranks(x: Tensor, weight: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, the mean over the features of all ranks.

    Args:
        x: this rank's features, [..., D / ranks]. Where several ranks have the same features, all
            are counted as often.
        weight: this rank's part.
        eps: added to the mean square.
        group: process group of the tensor axis.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Each rank's part of the loss depends on all ranks' squares: gradients are summed as well.
    total = all_reduce(wide.square().sum(-1, keepdim=True), group)
    inverse = (total / (x.shape[-1] * group.size()) + eps).rsqrt()
    return (wide * inverse * weight.to(x.dtype)).to(x.dtype)


def slice_sequence(own: Callable[[Tensor], Tensor], whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's positions of what `own` returns for whole rows, [B, S / ranks, ...]."""
    return own(whole).chunk(mesh.size(), SEQUENCE)[mesh.get_local_rank()]


def share_adapter(layer: nn.Module, mesh: DeviceMesh, *, shares_columns: bool) -> None:
    """Let an adapter draw dropout and sum the norms of DoRA as one rank does, in place.

    Args:
        layer: a projection; without an adapter it stays as it is.
        mesh: the tensor axis of the device mesh.
        shares_columns: whether each rank has some columns of the weight.
    """
    if not isinstance(layer, AdaptedLinear):
        return
    layer.own_positions = partial(slice_sequence, layer.own_positions, mesh=mesh)
    if shares_columns:
        layer.first_column = -(-layer.in_features // mesh.size()) * mesh.get_local_rank()
        layer.sum_columns = partial(all_reduce_no_grad, group=mesh.get_group())
