"""Gradients that no wrapper reduces: once a step, after its last backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..core.local import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def reducing(
    whole: list[nn.Parameter], kept: list[nn.Parameter], mesh: DeviceMesh, device: torch.device
) -> Callable[[], None]:
    """Return what reduces the gradients that no wrapper does, in one collective an axis.

    Args:
        whole: weights whose gradients are summed over the tensor axis.
        kept: those whose gradients are averaged over the data axes, as FSDP does with the others.
        mesh: see `build_mesh`.
        device: where collectives are.
    """
    reductions = [(whole, dist.ReduceOp.SUM, mesh.get_group("tensor"))] if whole else []
    for axis in ("shard", "replicate"):
        if kept and mesh[axis].size() > 1:
            reductions.append((kept, dist.ReduceOp.AVG, mesh.get_group(axis)))

    def finish() -> None:
        for weights, operation, group in reductions:
            gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
            if not gradients:
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
            dist.all_reduce(flat, operation, group)
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    return finish
