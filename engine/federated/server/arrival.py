"""An update that has reached the server."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..client import Client
from ..merge.geometry import Gradient


@dataclass
class Arrival:
    """An update that has reached the server.

    Attributes:
        client: the client that sent it.
        weight: weight in a mean.
        norm: L2 norm of the pseudo-gradient as it arrived.
        bytes_sent: payload of the weights and buffers.
        rejected: why it is not merged; empty: it is.
        is_late: whether a later round merges it.
        cosines: with the other updates of the round, by the client's name.
        gradient: the pseudo-gradient, where all of a round are merged together.
    """

    client: Client
    weight: float
    norm: float
    bytes_sent: int
    rejected: str = ""
    is_late: bool = False
    cosines: dict[str, float] = field(default_factory=dict)
    gradient: Gradient | None = None
