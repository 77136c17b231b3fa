"""The configs of carriers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..tables import CarrierConfig

if TYPE_CHECKING:
    from .local_carrier import LocalCarrier


class Local(CarrierConfig):
    """Clients train one after another in this process, or in the ranks of one client's plan."""

    name: Literal["local"] = "local"

    def build(self) -> type[LocalCarrier]:
        """Return the class of the carrier."""
        from .local_carrier import LocalCarrier

        return LocalCarrier
