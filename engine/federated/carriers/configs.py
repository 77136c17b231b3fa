"""The configs of carriers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...core.errors import Problem, RecipeError
from ..tables import CarrierConfig, Federation, carriers

if TYPE_CHECKING:
    from .local_carrier import LocalCarrier
    from .torchrun_carrier import TorchrunCarrier


class Local(CarrierConfig):
    """Clients train one after another in this process, or in the ranks of one client's plan."""

    name: Literal["local"] = "local"

    def build(self) -> type[LocalCarrier]:
        """Return the class of the carrier."""
        from .local_carrier import LocalCarrier

        return LocalCarrier


class Torchrun(CarrierConfig):
    """Clients train at the same time, each in its own part of the ranks of one job."""

    name: Literal["torchrun"] = "torchrun"

    def build(self) -> type[TorchrunCarrier]:
        """Return the class of the carrier."""
        from .torchrun_carrier import TorchrunCarrier

        return TorchrunCarrier

    def num_parts(self, table: Federation) -> int:
        """Return the number of clients."""
        return table.num_clients


class JobCarrier(Torchrun):
    """The replica groups of an ordinary run are the clients: LocalSGD and DiLoCo in a cluster."""

    name: Literal["job"] = "job"  # type: ignore[assignment]  # the same carrier by another name


def ranks_of_client(table: Federation, world: int) -> int:
    """Return the number of ranks of one client's plan.

    Args:
        table: the recipe's `[federation]`.
        world: number of ranks of the job.

    Raises:
        RecipeError: the carrier needs a part of the ranks for each client, or is the one of
            ordinary runs.
    """
    if table.is_job:
        message = 'carrier = "job" makes the replica groups of an ordinary run the clients'
        hint = "run it with `trainer run`"
        raise RecipeError([Problem(message, key="federation.carrier", hint=hint)])
    parts = carriers[table.carrier].model_validate({}).num_parts(table)
    if world % parts:
        message = f"{parts} clients of equally many ranks cannot share {world}"
        hint = f"start a multiple of {parts} ranks: --nproc {-(-world // parts) * parts}"
        raise RecipeError([Problem(message, key="federation.carrier", hint=hint)])
    return world // parts
