"""The registry of carriers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.config import Component
from ...core.registry import Registry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..tables import Federation
    from .client_ranks import ClientRanks


class CarrierConfig(Component):
    """Base of what moves weights and updates between the server and its clients."""

    def build(self, table: Federation) -> type[Any]:
        """Return the class of the carrier that a recipe's table asks for; see `LocalCarrier`."""
        raise NotImplementedError

    def num_parts(self, table: Federation) -> int:
        """Return into how many parts the ranks of a job are divided, one for each client.

        Args:
            table: the recipe's `[federation]`.
        """
        return 1

    def divide(
        self, table: Federation, job: ProcessGroup | None, timeout_seconds: float
    ) -> ClientRanks:
        """Return the clients of this rank.

        Args:
            table: the recipe's `[federation]`.
            job: a gloo group of all ranks; None: one process.
            timeout_seconds: how long a collective waits for the other clients.
        """
        from .client_ranks import ClientRanks

        return ClientRanks()


carriers: Registry[CarrierConfig] = Registry(
    "carrier",
    default="local",
    built_in={
        "local": "engine.federated.carriers.configs:Local",
        "torchrun": "engine.federated.carriers.configs:Torchrun",
        "job": "engine.federated.carriers.configs:JobCarrier",
        "elastic": "engine.federated.carriers.configs:ElasticReplicas",
    },
)
