"""Merges adapters into the weights beside them (arXiv:2106.09685, 4.1; DoRA: arXiv:2402.09353)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...model_zoo.layers.dense import Adapted, AdaptedLinear, DoRALinear, Linear
from ...model_zoo.layers.experts import Experts
from ...model_zoo.matrices import DOWN, UP, adapter_names, is_adapter, magnitude_name
from ..core.local import is_split

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@torch.no_grad()
def merge(
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    magnitude: Tensor | None = None,
    sum_columns: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> Tensor:
    """Return weight + scale * up @ down, summed in fp32 or wider, in the dtype of the weight.

    Args:
        weight: [out, in], plain or sharded; a sharded one comes back with the same placements. Or a
            stack of experts, [E, ..., in].
        down: A, [rank, in], or [E, rank, in].
        up: B, [out, rank], or [E, ..., rank].
        scale: see `LoRA.scale`.
        magnitude: [out], the norms that DoRA gives the rows of the sum; None: it is no DoRA.
        sum_columns: sums the squares of rows over ranks, of which each has some columns.
    """
    if is_split(weight):
        return _merge_pieces(cast("DTensor", weight), down, up, scale, magnitude)
    # A bf16 sum would round away updates that are small beside the weight.
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows = up.reshape(*down.shape[:-2], -1, up.shape[-1])
    total = weight.to(wide) + (rows.to(wide) @ down.to(wide)).view_as(weight) * scale
    if magnitude is not None:
        norms = sum_columns(total.square().sum(-1)).clamp(min=torch.finfo(wide).tiny).sqrt()
        total = total * (magnitude.to(wide) / norms).unsqueeze(-1)
    return total.to(weight.dtype)


def _merge_pieces(
    weight: DTensor, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None
) -> Tensor:
    """Return the merged weight; each rank makes its shard of it from rows of B and columns of A."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    last, stacked = weight.ndim - 1, set(range(down.ndim - 2))

    def move(place: Placement, dims: Mapping[int, int]) -> Placement:
        dim = getattr(place, "dim", -1)  # torch's strided shards have one too
        moved = dims.get(dim)
        if moved is None:
            return Replicate()
        return place if moved == dim else Shard(moved)

    def cut(adapter: Tensor, dims: Mapping[int, int]) -> Tensor:
        # Gathered whole: an adapter is small, and FSDP may split it along another dim.
        whole = cast("DTensor", adapter).full_tensor() if is_split(adapter) else adapter
        places = [move(p, dims) for p in weight.placements]
        placed = distribute_tensor(whole, weight.device_mesh, places, src_data_rank=None)
        return placed.to_local()

    same = {dim: dim for dim in range(last)}
    columns = {dim: dim for dim in stacked} | {last: down.ndim - 1}

    def sum_columns(squares: Tensor) -> Tensor:
        for axis, place in enumerate(weight.placements):
            if getattr(place, "dim", -1) == last:
                dist.all_reduce(squares, group=weight.device_mesh.get_group(axis))
        return squares

    norms = None if magnitude is None else cut(magnitude, same)
    pieces = weight.to_local(), cut(down, columns), cut(up, same)
    merged = merge(*pieces, scale, norms, sum_columns)
    return DTensor.from_local(
        merged,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by name, without gradients, with the adapters merged into them.

    Without adapters these are its parameters. On several ranks of a sharded model all call it, and
    get DTensors. A tied weight appears once.
    """
    scales = {path: each.scale for path, each in model.named_modules() if isinstance(each, Adapted)}
    stored = {name: value.detach() for name, value in model.named_parameters()}
    weights = {}
    for name, value in stored.items():
        down, up = map(stored.get, adapter_names(name))
        if down is not None and up is not None:
            scale, magnitude = scales[name.rpartition(".")[0]], stored.get(magnitude_name(name))
            weights[name] = merge(value, down, up, scale, magnitude)
        elif not is_adapter(name):
            weights[name] = value
    return weights


@torch.no_grad()
def start_magnitudes(model: nn.Module) -> None:
    """Give magnitudes of DoRA that are still zero the norms of their weights' rows, in place.

    On several ranks all call it, and gather one weight at a time.
    """
    for module in model.modules():
        if isinstance(module, DoRALinear):
            whole = merge(module.weight, module.lora_a, module.lora_b, module.scale)
            whole = cast("DTensor", whole).full_tensor() if is_split(whole) else whole
            start: Tensor = torch.linalg.vector_norm(whole, dim=1)
            magnitude: Tensor = module.lora_magnitude
            if is_split(magnitude):
                from torch.distributed.tensor import distribute_tensor

                mesh, places = magnitude.device_mesh, magnitude.placements  # type: ignore[attr-defined] # a DTensor
                start = distribute_tensor(start, mesh, places, src_data_rank=None)
            magnitude.copy_(start.where(magnitude == 0, magnitude))


def merge_adapters(model: nn.Module) -> None:
    """Replace each adapted layer of an unsharded model by a plain one, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            # On meta, because the merged weight replaces the new one at once.
            with torch.device("meta"):
                plain = Linear(module.in_features, module.out_features)
            plain.bias = module.bias
            magnitude = module.lora_magnitude if isinstance(module, DoRALinear) else None
            pieces = module.weight, module.lora_a, module.lora_b
            plain.weight = nn.Parameter(merge(*pieces, module.scale, magnitude))
            model.set_submodule(path, plain)
        elif isinstance(module, Experts):
            stored = dict(module.named_parameters())
            for key in module.matrices:
                if f"{key}_{DOWN}" in stored:
                    down, up = stored[f"{key}_{DOWN}"], stored[f"{key}_{UP}"]
                    module.replace_adapted(key, merge(stored[key], down, up, module.scale))
