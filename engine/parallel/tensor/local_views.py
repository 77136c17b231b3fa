"""Modules that compute with plain tensors while their parameters are DTensors.

A module's class is replaced by a subclass in which a property of the parameter's name returns the
local tensor that the module computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..collectives import all_gather

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LocalView:
    """Maps a parameter's local shard to the plain tensor that its module computes with.

    The backward pass is the inverse: an all-gather becomes a reduce-scatter, and a slice becomes
    zero padding.

    Attributes:
        group: process group of the tensor axis; None: the parameter is replicated over all axes.
        gather_dim: dimension along which the group's shards are concatenated first, or None.
        slice: dimension, start and length of the part that this rank uses then; None: all of it.
    """

    group: ProcessGroup | None = None
    gather_dim: int | None = None
    slice: tuple[int, int, int] | None = None


class LocalViews:
    """A module whose parameters are seen through a `LocalView` each."""

    local_views: dict[str, LocalView]


def local_parameter(owner: LocalViews, key: str) -> Tensor:
    """Return the tensor that a module computes with in place of one of its parameters."""
    parameter = cast("Tensor", cast("nn.Module", owner)._parameters[key])
    local_view = owner.local_views.get(key)
    if local_view is None:
        return parameter
    placed = cast("DTensor", parameter)
    # Outside of the forward pass FSDP asks for the parameter that it sharded, on a larger mesh.
    if local_view.group is not None and placed.device_mesh.ndim > 1:
        return placed
    stored = placed.to_local()
    if local_view.gather_dim is not None:
        assert local_view.group is not None, "shards are gathered over a group"
        stored = all_gather(stored, local_view.gather_dim, local_view.group)
    return stored if local_view.slice is None else stored.narrow(*local_view.slice)


def install_local_views(
    module: nn.Module, local_views: dict[str, LocalView], trait: type[LocalViews] = LocalViews
) -> None:
    """Let a module see its parameters through local views; later calls add views."""
    kind = type(module)
    if not (isinstance(module, trait) and all(hasattr(kind, key) for key in local_views)):
        # One class for all modules of a kind: compiled blocks share their code by it.
        module.__class__ = _with_trait(
            cast("Hashable", kind), cast("Hashable", trait), frozenset(local_views)
        )
    module.local_views = {**module.__dict__.get("local_views", {}), **local_views}  # type: ignore[assignment]


@cache
def _with_trait(base: Any, trait: Any, keys: frozenset[str]) -> Any:
    return type(
        base.__name__, (trait, base), {key: property_from(local_parameter, key) for key in keys}
    )


def property_from(function: Callable[[Any, str], Tensor], key: str) -> property:
    """Return a property whose value is `function(module, key)`."""
    return property(lambda module: function(module, key))


def placement(dim: int | None) -> Placement:
    """Return the DTensor placement of a tensor that is split along `dim`, or replicated (None)."""
    return Replicate() if dim is None else Shard(dim)


def distribute_parameter(
    module: nn.Module, key: str, mesh: DeviceMesh, placements: list[Placement]
) -> None:
    """Replace a parameter on the meta device by a DTensor."""
    weight = cast("nn.Parameter", module._parameters[key])
    placed = distribute_tensor(weight.data, mesh, placements, src_data_rank=None)
    module._parameters[key] = nn.Parameter(placed, requires_grad=weight.requires_grad)


def replicate_parameters(model: nn.Module, names: Collection[str], mesh: DeviceMesh) -> None:
    """Replicate some parameters on the meta device over all ranks of a mesh.

    FSDP ignores them. They become DTensors because an optimizer cannot update plain tensors and
    DTensors in one operation.
    """
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        weight = cast("nn.Parameter", module._parameters[key])
        plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        module._parameters[key] = nn.Parameter(plain, requires_grad=weight.requires_grad)
        distribute_parameter(module, key, mesh, [Replicate()] * mesh.ndim)
        used = module.local_views[key].slice if isinstance(module, LocalViews) else None
        install_local_views(module, {key: LocalView(slice=used)})
