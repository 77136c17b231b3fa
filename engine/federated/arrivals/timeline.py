"""Which updates a round merges, by simulated time: quorum, deadline, grace window, late updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .tables import Late, Trace
from .trace import ClientTrace


@dataclass(frozen=True)
class Flight:
    """An update that is under way.

    Attributes:
        client: number of the client.
        round: number of the round in which the client started, counted from 1.
        start: the time of the start, in seconds since the start of the run.
        arrival: the time at which the update reaches the server.
    """

    client: int
    round: int
    start: float
    arrival: float


@dataclass(frozen=True)
class RoundTiming:
    """What happens in a round.

    Attributes:
        trained: numbers of the clients whose work of this round is not lost, ascending.
        merged: the updates that the round merges, in the order of client number.
        dropped: the updates that are too late, and lost.
        failed: numbers of the clients that failed.
        seconds: simulated duration of the round.
    """

    trained: list[int]
    merged: list[Flight]
    dropped: list[Flight]
    failed: list[int]
    seconds: float


@dataclass
class Timeline:
    """The simulated clock of a federation.

    Args:
        late: the recipe's `[federation.late]`.
        faults: the recipe's `[federation.trace]`.
        trace: durations and failures of the clients.

    Attributes:
        clock: seconds since the start of the run.
        flights: the updates that are under way.
        ready: when clients that failed can train again, by number.
    """

    late: Late
    faults: Trace
    trace: ClientTrace
    clock: float = 0.0
    flights: list[Flight] = field(default_factory=list)
    ready: dict[int, float] = field(default_factory=dict)

    def run_round(self, number: int, chosen: Sequence[int]) -> RoundTiming:
        """Let the clients of a round start, and return what reaches the server before it ends.

        Clients whose update is under way, or which have failed and not recovered, do not start.

        Args:
            number: number of the round, counted from 1.
            chosen: numbers of the clients that are drawn for it.
        """
        begin, busy = self.clock, {flight.client for flight in self.flights}
        idle = [client for client in chosen if client not in busy]
        if not busy and idle and all(self.ready.get(each, 0.0) > self.clock for each in idle):
            self.clock = min(self.ready[each] for each in idle)  # no one could train before
        started = [client for client in idle if self.ready.get(client, 0.0) <= self.clock]
        draw, failed = self.trace.draw(number), list[int]()
        lost, seconds, fails = (
            each.tolist() for each in (draw.failure_seconds, draw.seconds, draw.fails)
        )
        for client in started:
            if fails[client]:
                failed.append(client)
                self.ready[client] = self.clock + lost[client] + self.faults.recovery_seconds
            else:
                arrival = self.clock + seconds[client]
                self.flights.append(Flight(client, number, self.clock, arrival))
        self.clock = self._find_end(failed)
        arrived = [flight for flight in self.flights if flight.arrival <= self.clock]
        merged = sorted(arrived, key=lambda flight: flight.client)
        if len(arrived) < (self.late.quorum or 1):
            merged = []
        taken = set(merged)
        left = [flight for flight in self.flights if flight not in taken]
        drops = self.late.policy == "drop"
        self.flights = [] if drops else left
        lost_clients = {flight.client for flight in left} if drops else set[int]()
        lost_clients.update(failed)
        trained = [each for each in started if each not in lost_clients]
        dropped = left if drops else []
        return RoundTiming(sorted(trained), merged, dropped, failed, self.clock - begin)

    def _find_end(self, failed: Sequence[int]) -> float:
        """Return the time at which the round ends."""
        late = self.late
        arrivals = sorted(flight.arrival for flight in self.flights)
        if not arrivals:
            # The server learns of the last failure, and gives the round up.
            ends = [self.ready[client] - self.faults.recovery_seconds for client in failed]
            return max(ends, default=self.clock)
        waits = late.deadline_seconds is not None or late.grace_seconds is not None
        needed = min(late.quorum or (1 if waits else len(arrivals)), len(arrivals))
        end = arrivals[needed - 1] + (late.grace_seconds or 0.0)
        if late.deadline_seconds is not None:
            end = max(end, self.clock + late.deadline_seconds)
        # Updates that arrived before the round began are merged at its end as well.
        return max(self.clock, min(arrivals[-1], end))

    def state(self) -> dict[str, Any]:
        """Return what is needed to resume; JSON."""
        flights = [asdict(flight) for flight in self.flights]
        ready = {str(client): seconds for client, seconds in self.ready.items()}
        return {"clock": self.clock, "flights": flights, "ready": ready}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken."""
        self.clock = state["clock"]
        self.flights = [Flight(**each) for each in state["flights"]]
        self.ready = {int(client): seconds for client, seconds in state["ready"].items()}
