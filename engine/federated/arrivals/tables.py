"""The tables of when updates arrive: simulated durations, quorum, deadline, late updates.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from ...core.config import Component, Count, RecipePath, Table
from ...core.registry import Registry

Seconds = Annotated[float, Field(ge=0)]


class Trace(Table):
    """How long clients take, and when they fail: a simulation, the same each time."""

    step_seconds: Annotated[float, Field(gt=0)] = 1.0
    """duration of an optimizer step of a client of middle speed"""
    spread: Seconds = 0.0
    """standard deviation of the logarithm of the clients' speeds, which they keep"""
    jitter: Seconds = 0.0
    """standard deviation of the logarithm of a client's duration from round to round"""
    failure: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """probability that a client fails in a round, at a random moment of it"""
    recovery_seconds: Seconds = 0.0
    """time after which a client that failed can train again"""
    bandwidth: Seconds = 0.0
    """bits per second of each client's link; 0: transfers take no time"""
    file: RecipePath = ""
    """metrics.jsonl of an earlier run, whose durations are replayed: those of its rows of kind
    "client"; other clients and rounds are simulated"""


class Late(Table):
    """When a round ends, and what becomes of updates that arrive later."""

    policy: Literal["drop", "next", "stale"] = "drop"
    """"drop": a late client gives up, and starts again with the next round; "next": it continues,
    and its update is merged with the round in which it arrives; "stale": so, with less weight"""
    quorum: Count | None = None
    """updates that a round needs; with fewer it merges nothing; default: as many as have started,
    with a deadline or a grace window one"""
    deadline_seconds: Annotated[float, Field(gt=0)] | None = None
    """how long a round waits for clients; longer until the quorum has arrived"""
    grace_seconds: Seconds | None = None
    """how long a round waits for more after the quorum has arrived (asynchronous learners)"""
    power: Seconds = 0.5
    """of "stale": the weight of an update that is s rounds old is multiplied by (1 + s)^-power
    (arXiv:1903.03934)"""

    @property
    def is_enabled(self) -> bool:
        """Whether a round may end before all updates are there."""
        return (self.quorum, self.deadline_seconds, self.grace_seconds) != (None, None, None)

    def weigh(self, staleness: int) -> float:
        """Return the factor of the weight of an update that is so many rounds old."""
        return float((1 + staleness) ** -self.power) if self.policy == "stale" else 1.0


class DropoutConfig(Component):
    """Base of what leaves out clients that were drawn for a round."""

    def select(self, drawn: Sequence[int], speeds: Sequence[float], count: int) -> list[int]:
        """Return the clients that stay.

        Args:
            drawn: numbers of the clients, in random order.
            speeds: speed of each client of the federation, by number.
            count: how many stay.
        """
        raise NotImplementedError


dropouts: Registry[DropoutConfig] = Registry(
    "dropout",
    default="uniform",
    built_in={
        "uniform": "engine.federated.arrivals.dropouts:Uniform",
        "slowest": "engine.federated.arrivals.dropouts:Slowest",
    },
)
