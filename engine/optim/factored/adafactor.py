"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235, algorithm 6, and its relative step size)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from ...core.local import is_split, local, sum_over_shards

Group = dict[str, Any]


class AdafactorOptimizer(Optimizer):
    """Scales gradients by running means of their squares over rows and over columns.

    The means of a matrix, and of each matrix of a stack, are whole on each rank that holds a part
    of the parameter: `rows` without the last dimension, `columns` without the last but one. Vectors
    have a mean for each element. A step never waits for the device.

    Args:
        groups: parameter groups of torch.
        defaults: options for the groups that do not set them; `lr`, `weight_decay`, `beta2_decay`,
            `eps` and `d`, with the meaning of `torch.optim.Adafactor`.
    """

    def __init__(self, groups: Sequence[Group], **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._indices: dict[Any, tuple[Any, ...]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            # All sums of a group travel together, over the ranks of the same shards.
            sums = sum_over_shards(weights, [self._sum_squares(weight) for weight in weights])
            updates = [
                self._scale(group, weight, values)
                for weight, values in zip(weights, sums, strict=True)
            ]
            squares = sum_over_shards(weights, [update.square().sum() for update in updates])
            for weight, update, values, square in zip(weights, updates, sums, squares, strict=True):
                step, count = self.state[weight]["step"], weight.numel()
                size = (values[0] / count).sqrt().clamp(min=group["eps"][1])
                factor = size * min(group["lr"], step**-0.5)
                factor = factor / ((square / count).sqrt() / group["d"]).clamp(min=1.0)
                part = local(weight)
                part.mul_(1 - group["lr"] * group["weight_decay"])
                part.sub_(update.mul_(factor))

    def _sum_squares(self, weight: Tensor) -> Tensor:
        """Return this rank's share of the sums of squares, in one vector.

        They are the sum of the squared weights and, of a matrix, those of the squared gradients
        of each row and of each column of the whole.
        """
        total = local(weight).square().sum().view(1)
        if weight.ndim < 2:
            return total
        squares, parts = _local_gradient(weight).square(), [total]
        for dim in (-1, -2):
            whole = squares.new_zeros(_shape_without(weight, dim))
            whole[self._index(weight, dim)] = squares.sum(dim)
            parts.append(whole.flatten())
        return torch.cat(parts)

    def _scale(self, group: Group, weight: Tensor, sums: Tensor) -> Tensor:
        """Update the means of squares, and return this rank's part of the scaled gradient."""
        state, gradient, eps = self.state[weight], _local_gradient(weight), group["eps"][0]
        state["step"] = state.get("step", 0) + 1
        share = state["step"] ** group["beta2_decay"]
        if weight.ndim < 2:
            if "squares" not in state:
                state["squares"] = torch.zeros_like(weight)
            estimate = local(state["squares"]).lerp_(gradient.square(), share)
        else:
            start, sides = 1, []
            for name, dim in (("rows", -1), ("columns", -2)):
                shape = _shape_without(weight, dim)
                end = start + shape.numel()
                means = sums[start:end].view(shape) / weight.shape[dim]
                if name not in state:
                    state[name] = torch.zeros_like(means)
                sides.append(state[name].lerp_(means, share))
                start = end
            rows, columns = sides
            rows = rows / rows.mean(-1, keepdim=True).clamp(min=eps)
            estimate = rows[self._index(weight, -1)].unsqueeze(-1)
            estimate = estimate * columns[self._index(weight, -2)].unsqueeze(-2)
        return estimate.clamp(min=eps * eps).rsqrt_().mul_(gradient)

    def _index(self, weight: Tensor, without: int) -> tuple[Any, ...]:
        """Return `local_indices`, which are the same in each step."""
        placed = getattr(weight, "placements", ()), getattr(weight, "device_mesh", None)
        key = (*placed, weight.shape, without)
        if key not in self._indices:
            self._indices[key] = local_indices(weight, without)
        return self._indices[key]


def _local_gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None, "weights without a gradient are left out"
    return local(weight.grad)


def _shape_without(weight: Tensor, dim: int) -> torch.Size:
    sizes = list(weight.shape)
    del sizes[dim]
    return torch.Size(sizes)


def local_indices(tensor: Tensor, without: int) -> tuple[Any, ...]:
    """Return what selects this rank's part of a whole tensor that lacks one dimension.

    Args:
        tensor: a DTensor with any placement, or a tensor that is whole on this rank.
        without: the dimension that is missing, counted from the end.
    """
    if not is_split(tensor):
        return (...,)
    placed = cast(DTensor, tensor)
    dims = [dim for dim in range(tensor.ndim) if dim != tensor.ndim + without]
    found = []
    for number, dim in enumerate(dims):
        places = [
            at if getattr(at, "dim", None) == dim else Replicate() for at in placed.placements
        ]
        # An index that is split like the tensor: it knows strided and uneven shards.
        sizes = [1] * tensor.ndim
        sizes[dim] = tensor.shape[dim]
        index = torch.arange(tensor.shape[dim], device=tensor.device).view(sizes)
        part = distribute_tensor(index, placed.device_mesh, places, src_data_rank=None)
        shape = [1] * len(dims)
        shape[number] = -1
        found.append(part.to_local().reshape(shape))
    return tuple(found)
