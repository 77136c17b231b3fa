"""Parameters that are stored as DTensors while their layers compute with plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ....model_zoo.layers.dense import LocalParameters
from ..collectives import all_gather


@dataclass(frozen=True)
class LocalView:
    """Maps a parameter's local shard to the plain tensor that its layer computes with.

    The backward pass is the inverse: an all-gather becomes a reduce-scatter, and a slice becomes
    zero padding.

    Attributes:
        group: process group of the tensor axis; None: the parameter is replicated over all axes.
        gather_dim: dimension along which the group's shards are concatenated first, or None.
        slice: dimension, start and length of the part that this rank uses then; None: all of it.
        counts: False for the bias of outputs that ranks sum, on all ranks but one: it is added
            once.
    """

    group: ProcessGroup | None = None
    gather_dim: int | None = None
    slice: tuple[int, int, int] | None = None
    counts: bool = True

    def __call__(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the layer computes with."""
        # `to_local` runs no collective, in the backward pass either: the gradient of a replicated
        # parameter is this rank's alone until `make_replicated_reduction` reduces it.
        tensor = cast("DTensor", parameter).to_local()
        if self.gather_dim is not None:
            assert self.group is not None, "shards are gathered over a group"
            tensor = all_gather(tensor, self.gather_dim, self.group)
        if not self.counts:
            tensor = tensor * 0.0  # not left out: the parameter needs a gradient on every rank
        return tensor if self.slice is None else tensor.narrow(*self.slice)


def placement(dim: int | None) -> Placement:
    """Return the DTensor placement of a tensor that is split along `dim`, or replicated (None)."""
    return Replicate() if dim is None else Shard(dim)


def distribute_parameter(
    module: nn.Module,
    key: str,
    mesh: DeviceMesh,
    placements: list[Placement],
    view: Callable[[Tensor], Tensor],
) -> None:
    """Replace a parameter on the meta device by a DTensor.

    Args:
        module: the layer that holds the parameter.
        key: the parameter's name in the layer.
        mesh: the mesh of the ranks that share the parameter.
        placements: the placement of the parameter on each axis of the mesh.
        view: maps the DTensor to the plain tensor that the layer computes with.

    Raises:
        TypeError: the layer is no `LocalParameters` layer, and so has no views.
    """
    if not isinstance(module, LocalParameters):
        kind = type(module).__name__
        raise TypeError(f"ranks cannot share {kind}.{key}: {kind} is no LocalParameters layer")
    weight = cast("nn.Parameter", module._parameters[key])
    # No source rank, and so no communication: on the meta device there are no values to send.
    placed = distribute_tensor(weight.data, mesh, placements, src_data_rank=None)
    module._parameters[key] = nn.Parameter(placed, requires_grad=weight.requires_grad)
    module.local_views[key] = view


def replicate_parameters(
    model: nn.Module, tensor_dims: Mapping[str, int | None], mesh: DeviceMesh
) -> None:
    """Replicate some parameters on the meta device over the data axes of a mesh.

    FSDP ignores these parameters. They become DTensors because an optimizer cannot update plain
    tensors and DTensors in one operation.

    Args:
        model: the model, whose parameters may be split over the tensor axis already.
        tensor_dims: for the name of each, the dimension that the tensor axis splits; None: its
            ranks hold the same.
        mesh: the mesh of the ranks that hold them; only its axis "tensor" splits.
    """
    axes = mesh.mesh_dim_names or ()
    for name, dim in tensor_dims.items():
        path, _, key = name.rpartition(".")
        module = cast("LocalParameters", model.get_submodule(path))
        weight = cast("nn.Parameter", module._parameters[key])
        # Distributed over the tensor axis before: start again from the global shape.
        plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        module._parameters[key] = nn.Parameter(plain, requires_grad=weight.requires_grad)
        placements = [placement(dim if axis == "tensor" else None) for axis in axes]
        # The layer goes on computing with what it used of the tensor axis' shard.
        view = module.local_views.get(key, LocalView())
        distribute_parameter(module, key, mesh, placements, view)
