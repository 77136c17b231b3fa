"""Adapters added to the weights beside them (arXiv:2106.09685, section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...model_zoo.layers.linear import Linear
from .layer import AdaptedLinear

if TYPE_CHECKING:
    from torch import nn


@torch.no_grad()
def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return weight + scale * up @ down, summed in fp32, in the dtype of the weight.

    Args:
        weight: [out, in], plain or sharded; a sharded one comes back with the same placements.
        down: A, [rank, in].
        up: B, [out, rank].
        scale: alpha / rank.
    """
    if hasattr(down, "full_tensor"):  # each rank has rows of A, and its rows of B need them all
        from torch.distributed.tensor import Replicate

        down = down.redistribute(placements=[Replicate()] * down.device_mesh.ndim)  # type: ignore[attr-defined]
    product = up.float() @ down.float()
    return (weight.float() + product * scale).to(weight.dtype)


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by name, without gradients; adapters are merged into theirs.

    Without adapters these are its parameters. On several ranks of a sharded model all call it, and
    get DTensors. A tied weight appears once.
    """
    adapted = {
        f"{path}.": module
        for path, module in model.named_modules()
        if isinstance(module, AdaptedLinear)
    }
    weights = {}
    for name, value in model.named_parameters():
        path, leaf = name[: name.rfind(".") + 1], name.rpartition(".")[2]
        module = adapted.get(path)
        if module is None:
            weights[name] = value.detach()
        elif leaf == "weight":
            weights[name] = merge(value.detach(), module.lora_a, module.lora_b, module.scale)
    return weights


def merge_adapters(model: nn.Module) -> None:
    """Replace each adapted projection of an unsharded model by a plain one, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            with torch.device("meta"):
                plain = Linear(module.in_features, module.out_features)
            plain.weight = torch.nn.Parameter(
                merge(module.weight, module.lora_a, module.lora_b, module.scale)
            )
            model.set_submodule(path, plain)
