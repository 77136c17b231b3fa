"""Sizes of the parallel axes, and the device meshes that they make."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

from ..core.errors import Problem, RecipeError
from .tables import Parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes of the device mesh; ranks next to each other differ in the last axis."""
EXPERT_AXES = ("expert", "expert_tensor")
"""Axes of the mesh over which experts are placed; other parameters have no such axis."""


@dataclass(frozen=True)
class Degrees:
    """The size of each axis of the mesh."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """ranks of a pipeline stage over which the experts of a layer are divided"""
    expert_tensor: int = 1
    """ranks of a pipeline stage over which the width of each expert is divided"""

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def dp_cp(self) -> int:
        """Ranks over which gradients are reduced: data parallel times context parallel."""
        return self.data * self.context

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are divided."""
        return self.expert * self.expert_tensor

    @property
    def world(self) -> int:
        """The world size."""
        return prod(getattr(self, axis) for axis in AXES)

    def coordinate(self, rank: int) -> Degrees:
        """Return the coordinate of a rank on each axis."""
        among = rank % self.expert_ranks
        place = dict(zip(EXPERT_AXES, divmod(among, self.expert_tensor), strict=True))
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Degrees(**place)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        at = self.coordinate(rank)
        return at.replicate * self.shard + at.shard


def resolve_degrees(table: Parallel, world: int) -> Degrees:
    """Return the degrees with -1 replaced by what is left of the world size.

    Raises:
        RecipeError: the degrees do not multiply to the world size.
    """
    given = {axis: getattr(table, axis) for axis in AXES}
    known = prod(degree for degree in given.values() if degree > 0)
    free = [axis for axis, degree in given.items() if degree == -1]
    if world % known or (not free and known != world):
        product = " x ".join(f"{axis} {degree}" for axis, degree in given.items() if degree != 1)
        raise RecipeError(
            [
                Problem(
                    f"{product or 'one rank'} does not make {world} ranks",
                    key="parallel",
                    hint="set one degree to -1 to take what is left over",
                )
            ]
        )
    for axis in free:
        given[axis] = world // known
    return Degrees(**given, expert=table.expert, expert_tensor=table.expert_tensor)


def is_sharded(table: Parallel, degrees: Degrees) -> bool:
    """Return whether the plan splits parameters over the ranks that see different samples."""
    ranks = degrees.shard * degrees.context
    return table.fsdp.strategy != "no_shard" and (ranks > 1 or table.fsdp.offload)


def uses_fsdp(table: Parallel, degrees: Degrees) -> bool:
    """Return whether FSDP2 reduces the gradients.

    It does so also for mere replicas of weights that tensor parallelism has split, of a pipeline's
    stages, and beside experts that ranks share: DDP does not know them.
    """
    also = degrees.dp_cp > 1 and (degrees.tensor > 1 or degrees.pipeline > 1)
    return is_sharded(table, degrees) or also or degrees.expert_ranks > 1


def build_mesh(degrees: Degrees, device_type: str, *, sharded: bool) -> DeviceMesh:
    """Return the mesh on which parameters are placed; all ranks call it.

    Its axes are `pipeline`, `replicate`, `shard` and `tensor`. Ranks along the context axis hold
    the same weights, so weights are sharded over them too. Where nothing is sharded, all of these
    ranks are replicas.
    """
    from torch.distributed.device_mesh import init_device_mesh

    replicate, shard = degrees.replicate, degrees.shard * degrees.context
    if not sharded:
        replicate, shard = replicate * shard, 1
    return init_device_mesh(
        device_type,
        (degrees.pipeline, replicate, shard, degrees.tensor),
        mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
    )


def expert_grid(degrees: Degrees, *, sharded: bool) -> tuple[int, int]:
    """Return how many ranks replicate, and how many shard, each share of the experts."""
    inner = degrees.shard * degrees.context * degrees.tensor if sharded else 1
    shard = inner // gcd(inner, degrees.expert_ranks)
    return degrees.dp_cp * degrees.tensor // degrees.expert_ranks // shard, shard


def build_expert_mesh(degrees: Degrees, device_type: str, *, sharded: bool) -> DeviceMesh:
    """Return the mesh on which experts are placed; all ranks call it."""
    from torch.distributed.device_mesh import init_device_mesh

    replicate, shard = expert_grid(degrees, sharded=sharded)
    return init_device_mesh(
        device_type,
        (degrees.pipeline, replicate, shard, degrees.expert, degrees.expert_tensor),
        mesh_dim_names=("pipeline", "replicate", "shard", *EXPERT_AXES),
    )


def context_group(degrees: Degrees, device_type: str) -> ProcessGroup:
    """Return the group of ranks that share this rank's sequences; all ranks call it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(
        device_type,
        (degrees.pipeline * degrees.data, degrees.context, degrees.tensor),
        mesh_dim_names=("rest", "context", "tensor"),
    )
    return mesh.get_group("context")
