"""Adapters added to the weights beside them (arXiv:2106.09685, section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ...model_zoo.layers.adapter import AdaptedLinear
from ...model_zoo.layers.adapter_names import DOWN, UP, is_adapter
from ...model_zoo.layers.linear import Linear
from ..core.local import is_split

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return weight + scale * up @ down, summed in fp32, in the dtype of the weight.

    Args:
        weight: [out, in], plain or sharded; a sharded one comes back with the same placements.
        down: A, [rank, in].
        up: B, [out, rank].
        scale: alpha / rank.
    """
    if is_split(weight):
        return _merge_pieces(cast("DTensor", weight), down, up, scale)
    product = up.float() @ down.float()
    return (weight.float() + product * scale).to(weight.dtype)


def _merge_pieces(weight: DTensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return each rank's piece of the sum, made of rows of B and columns of A."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    def cut(adapter: Tensor, dim: int) -> Tensor:
        whole = cast("DTensor", adapter).full_tensor() if is_split(adapter) else adapter
        # A shard's `dim` is also that of torch's strided ones, which FSDP makes of pieces.
        places = [p if getattr(p, "dim", None) == dim else Replicate() for p in weight.placements]
        placed = distribute_tensor(whole, weight.device_mesh, places, src_data_rank=None)
        return placed.to_local()

    merged = merge(weight.to_local(), cut(down, 1), cut(up, 0), scale)
    return DTensor.from_local(
        merged,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by name, without gradients; adapters are merged into theirs.

    Without adapters these are its parameters. On several ranks of a sharded model all call it, and
    get DTensors. A tied weight appears once.
    """
    adapted = {
        path: module for path, module in model.named_modules() if isinstance(module, AdaptedLinear)
    }
    stored = {name: value.detach() for name, value in model.named_parameters()}
    weights = {}
    for name, value in stored.items():
        path = name.rpartition(".")[0]
        if path not in adapted:
            weights[name] = value
        elif not is_adapter(name):
            down, up = stored[f"{path}.{DOWN}"], stored[f"{path}.{UP}"]
            weights[name] = merge(value, down, up, adapted[path].scale)
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
