"""The configs of carriers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...core.errors import Problem, RecipeError
from ..tables import CarrierConfig, Federation, carriers

if TYPE_CHECKING:
    from ..elastic.elastic_carrier import ElasticCarrier
    from .local_carrier import LocalCarrier
    from .torchrun_carrier import TorchrunCarrier


class Local(CarrierConfig):
    """Clients train on this machine: one after another, or in worker processes."""

    name: Literal["local"] = "local"

    def build(self, table: Federation) -> type[LocalCarrier]:
        """Return the class of the carrier."""
        if table.processes > 1:
            from .process_carrier import ProcessCarrier

            return ProcessCarrier
        from .local_carrier import LocalCarrier

        return LocalCarrier


class Torchrun(CarrierConfig):
    """Clients train at the same time, each in its own part of the ranks of one job."""

    name: Literal["torchrun"] = "torchrun"

    def build(self, table: Federation) -> type[TorchrunCarrier]:
        """Return the class of the carrier."""
        from .torchrun_carrier import TorchrunCarrier

        return TorchrunCarrier

    def num_parts(self, table: Federation) -> int:
        """Return the number of clients."""
        return table.num_clients


class JobCarrier(Torchrun):
    """The replica groups of an ordinary run are the clients: LocalSGD and DiLoCo in a cluster."""

    name: Literal["job"] = "job"  # type: ignore[assignment]  # the same carrier by another name


class ElasticReplicas(CarrierConfig):
    """Each replica group is a job of its own; torchft finds out which of them are there."""

    name: Literal["elastic"] = "elastic"

    def build(self, table: Federation) -> type[ElasticCarrier]:
        """Return the class of the carrier.

        Raises:
            EnvironmentFault: torchft is missing.
        """
        from ..elastic.elastic_carrier import ElasticCarrier
        from ..elastic.torchft_quorum import load_torchft

        load_torchft()  # before anything is opened
        return ElasticCarrier


def ranks_of_client(table: Federation, world: int) -> int:
    """Return the number of ranks of one client's plan.

    Args:
        table: the recipe's `[federation]`.
        world: number of ranks of the job.

    Raises:
        RecipeError: the carrier needs a part of the ranks for each client, or one rank a client,
            or is the one of ordinary runs.
    """
    if table.is_job:
        message = (
            f'carrier = "{table.carrier}" makes the replica groups of an ordinary run the clients'
        )
        hint = "run it with `trainer run`"
        raise RecipeError([Problem(message, key="federation.carrier", hint=hint)])
    if table.processes > 1 and world > 1:
        message = (
            f"is {table.processes}, and worker processes train clients of one rank, not {world}"
        )
        hint = 'leave it out, or train clients at once with carrier = "torchrun"'
        raise RecipeError([Problem(message, key="federation.processes", hint=hint)])
    parts = carriers[table.carrier].model_validate({}).num_parts(table)
    if world % parts:
        message = f"{parts} clients of equally many ranks cannot share {world}"
        hint = f"start a multiple of {parts} ranks: --nproc {-(-world // parts) * parts}"
        raise RecipeError([Problem(message, key="federation.carrier", hint=hint)])
    return world // parts
