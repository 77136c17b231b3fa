"""Modules that compute on plain tensors while their weights are DTensors: a class with properties
hands out the piece that the module needs, whatever its rank stores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..collectives import gather

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Use:
    """How a module gets from what its rank stores of a parameter to what it computes with.

    Gradients take the same way back. Where a rank uses a piece of what it stores whole, the
    gradient is zero outside of it.

    Attributes:
        group: the ranks of the tensor axis; None: every rank of all axes stores the whole.
        joined: dim along which the group's pieces are gathered; None: they are not.
        piece: dim, start and length of what is used then; None: all.
    """

    group: ProcessGroup | None = None
    joined: int | None = None
    piece: tuple[int, int, int] | None = None


class Weights:
    """Gives a module what it uses of its parameters, by properties of their names."""

    uses: dict[str, Use]


def used(owner: Weights, key: str) -> Tensor:
    """Return the part of a parameter that is used."""
    parameter = cast(Tensor, cast(nn.Module, owner)._parameters[key])
    use = owner.uses.get(key)
    if use is None:
        return parameter
    placed = cast(DTensor, parameter)
    # Outside of a forward pass FSDP asks for what it has sharded, over a mesh of more axes.
    if use.group is not None and placed.device_mesh.ndim > 1:
        return placed
    stored = placed.to_local()
    if use.joined is not None:
        assert use.group is not None, "pieces belong to a group"
        stored = gather(stored, use.joined, use.group)
    return stored if use.piece is None else stored.narrow(*use.piece)


def adopt(module: nn.Module, uses: dict[str, Use], trait: type[Weights] = Weights) -> None:
    """Let a module see its parameters as `uses` says; later calls add to what earlier ones said."""
    kind = type(module)
    if not (isinstance(module, trait) and all(hasattr(kind, key) for key in uses)):
        # One class for all modules of a kind: compiled blocks share their code by it.
        module.__class__ = _with_trait(
            cast("Hashable", kind), cast("Hashable", trait), frozenset(uses)
        )
    module.uses = {**module.__dict__.get("uses", {}), **uses}  # type: ignore[assignment]


@cache
def _with_trait(base: Any, trait: Any, keys: frozenset[str]) -> Any:
    return type(base.__name__, (trait, base), {key: view(used, key) for key in keys})


def view(function: Callable[[Any, str], Tensor], key: str) -> property:
    """Return a property that gives what a function says of a module and a parameter's name."""
    return property(lambda module: function(module, key))


def placement(dim: int | None) -> Placement:
    """Return that of ranks that hold pieces along a dim, or the same (None)."""
    return Replicate() if dim is None else Shard(dim)


def lay_out(module: nn.Module, key: str, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Make a parameter (still on `meta`) a DTensor."""
    weight = cast(nn.Parameter, module._parameters[key])
    placed = distribute_tensor(weight.data, mesh, placements, src_data_rank=None)
    module._parameters[key] = nn.Parameter(placed, requires_grad=weight.requires_grad)


def keep_whole(model: nn.Module, names: Collection[str], mesh: DeviceMesh) -> None:
    """Let every rank of a mesh store some parameters (still on `meta`) whole.

    FSDP is to ignore them. They are DTensors all the same, as those beside which they are updated.
    """
    for name in names:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        weight = cast(nn.Parameter, module._parameters[key])
        plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        module._parameters[key] = nn.Parameter(plain, requires_grad=weight.requires_grad)
        lay_out(module, key, mesh, [Replicate()] * mesh.ndim)
        piece = module.uses[key].piece if isinstance(module, Weights) else None
        adopt(module, {key: Use(piece=piece)})
