"""The state that all replica groups have alike after a round, and how one receives it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...core.local import local
from ...optim.tables import ScheduleState
from ...train.average import WeightAverage, reshard
from ...train.parts import Best, Parts, Position
from ..carriers.exchange import send_shards
from ..server.server import Server


class SharedState:
    """Global weights, states of the server optimizer and position of a run, on this rank.

    Args:
        parts: the parts of the run.
        server: the server.
    """

    def __init__(self, parts: Parts, server: Server) -> None:
        self._parts = parts
        self._server = server

    @property
    def layout(self) -> str:
        """A digest of names, shapes and types of this rank's tensors."""
        shapes = [(n, list(t.shape), str(t.dtype)) for n, t in self._tensors(has_average=False)]
        return sha256(repr(shapes).encode()).hexdigest()[:16]

    def numbers(self, position: Position) -> dict[str, Any]:
        """Return the numbers that another group needs to continue from a position; JSON."""
        return {
            "batch": position.batch,
            "count": int(position.count),
            "best": asdict(position.best),
            "schedule": asdict(position.schedule),
            "merged_bytes": self._server.merged_bytes,
            "has_average": any(each.has_begun for each in self._averages),
        }

    @torch.no_grad()
    def send(
        self, peers: ProcessGroup, has_average: bool, sender: int, receivers: Sequence[int]
    ) -> None:
        """Give some groups the tensors of one.

        Args:
            peers: the ranks of this place in all groups.
            has_average: whether the sender has an average of the weights.
            sender: rank of the group that sends, among the peers.
            receivers: ranks of the groups that receive.
        """
        send_shards(peers, dict(self._tensors(has_average)), sender, receivers)

    def take(self, step: int, numbers: Mapping[str, Any], position: Position) -> None:
        """Continue from another group's position, whose tensors this one has received."""
        reshard(self._parts.model)
        self._server.broadcast()
        self._server.merged_bytes = int(numbers["merged_bytes"])
        position.step, position.batch = step, int(numbers["batch"])
        position.count, position.unevaluated = int(numbers["count"]), False
        position.best = Best(**numbers["best"])
        position.schedule = ScheduleState(**numbers["schedule"])

    @property
    def _averages(self) -> list[WeightAverage]:
        return [each for each in self._parts.averages if isinstance(each, WeightAverage)]

    def _tensors(self, has_average: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shards by name."""
        for name, weight in self._server.weights.items():
            yield f"weight.{name}", local(weight)
            for key, state in self._server.states.get(name, {}).items():
                yield f"server_{key}.{name}", local(state)
        for average in self._averages if has_average else ():
            # With this name alone, it returns the averages themselves, blended or not.
            for name, tensor in average.prepare(["ema."]).items():
                yield name, local(tensor)
