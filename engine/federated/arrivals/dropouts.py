"""What leaves out clients that were drawn for a round. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .tables import DropoutConfig


class Uniform(DropoutConfig):
    """Leaves out clients at random."""

    name: Literal["uniform"] = "uniform"

    def select(self, drawn: Sequence[int], speeds: Sequence[float], count: int) -> list[int]:
        """Return the clients that stay: the last of a random order."""
        return list(drawn[len(drawn) - count :])


class Slowest(DropoutConfig):
    """Leaves out the clients that take longest."""

    name: Literal["slowest"] = "slowest"

    def select(self, drawn: Sequence[int], speeds: Sequence[float], count: int) -> list[int]:
        """Return the clients that stay: the fastest."""
        return sorted(drawn, key=lambda client: -speeds[client])[:count]
