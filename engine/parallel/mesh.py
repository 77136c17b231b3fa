"""From degrees to a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Problem, RecipeError
from ..recipe.tables import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Degrees:
    """How many ranks lie along each axis."""

    replicate: int
    shard: int

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard


def resolve_degrees(table: Parallel, world: int) -> Degrees:
    """Return the degrees with -1 replaced by what is left of the world size.

    Raises:
        RecipeError: the degrees do not multiply to the world size.
    """
    given = {"replicate": table.replicate, "shard": table.shard}
    known = 1
    for degree in given.values():
        known *= degree if degree > 0 else 1
    free = [axis for axis, degree in given.items() if degree == -1]
    if world % known or (not free and known != world):
        product = " x ".join(f"{axis} {degree}" for axis, degree in given.items())
        raise RecipeError(
            [
                Problem(
                    f"{product} does not make {world} ranks",
                    key="parallel",
                    hint="set one degree to -1 to take what is left over",
                )
            ]
        )
    for axis in free:
        given[axis] = world // known
    return Degrees(**given)


def build_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """Return the mesh with axes `replicate` and `shard`. Needs an initialised process group."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(
        device_type,
        (degrees.replicate, degrees.shard),
        mesh_dim_names=("replicate", "shard"),
    )
