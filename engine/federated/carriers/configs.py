"""The configs of carriers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..tables import CarrierConfig, Federation

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


class Job(Torchrun):
    """The replica groups of an ordinary run are the clients: LocalSGD and DiLoCo in a cluster."""

    name: Literal["job"] = "job"  # type: ignore[assignment]  # the same carrier by another name
