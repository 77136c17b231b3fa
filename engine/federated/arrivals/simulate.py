"""Rounds without training: how much of the clients' time is of use, under faults."""

from __future__ import annotations

from dataclasses import dataclass

from ..sampler import sample_clients
from ..tables import Federation
from .timeline import Timeline
from .trace import ClientTrace

MOST_ATTEMPTS = 1000
"""of a round of lock-step training, until it counts as hopeless"""


@dataclass(frozen=True)
class RoundSimulation:
    """What a simulation of rounds has found.

    Attributes:
        rounds: rounds that were simulated.
        seconds: simulated duration of all rounds.
        goodput: seconds of training that were merged, of those that all clients of a round had.
        lock_step_goodput: so, if all clients had to finish each round together, as in data-parallel
            training that starts a round again after a failure; 0: it would not finish.
        merged: updates that were merged.
        late: those that were merged with a later round than they started in.
        dropped: updates that were too late, and lost.
        failed: failures of clients.
        empty_rounds: rounds that merged nothing.
        staleness: mean age of a merged update, in rounds.
    """

    rounds: int
    seconds: float
    goodput: float
    lock_step_goodput: float
    merged: int
    late: int
    dropped: int
    failed: int
    empty_rounds: int
    staleness: float


def simulate_rounds(
    table: Federation, steps: int, transfer_bits: float, seed: int, rounds: int
) -> RoundSimulation:
    """Simulate the rounds of a federation with the code that a run decides with.

    Args:
        table: the recipe's `[federation]`.
        steps: optimizer steps of a client in a round.
        transfer_bits: bits that a client receives and sends in a round.
        seed: the recipe's `run.seed`.
        rounds: rounds to simulate.
    """
    names = [table.client_name(number) for number in range(table.num_clients)]
    trace = ClientTrace(table.trace, table.num_clients, steps, transfer_bits, seed, names)
    timeline = Timeline(table.late, table.trace, trace)
    useful, merged, late, dropped, failed, empty, age = 0.0, 0, 0, 0, 0, 0, 0
    for number in range(1, rounds + 1):
        timing = timeline.run_round(number, sample_clients(table, seed, number))
        useful += sum(flight.arrival - flight.start for flight in timing.merged)
        merged += len(timing.merged)
        late += sum(flight.round < number for flight in timing.merged)
        age += sum(number - flight.round for flight in timing.merged)
        dropped += len(timing.dropped)
        failed += len(timing.failed)
        empty += not timing.merged
    seconds, size = timeline.clock, table.sample_size
    return RoundSimulation(
        rounds=rounds,
        seconds=seconds,
        goodput=useful / (size * seconds) if seconds else 0.0,
        lock_step_goodput=_lock_step(table, trace, seed, rounds),
        merged=merged,
        late=late,
        dropped=dropped,
        failed=failed,
        empty_rounds=empty,
        staleness=age / merged if merged else 0.0,
    )


def _lock_step(table: Federation, trace: ClientTrace, seed: int, rounds: int) -> float:
    """Return the goodput of training that waits for all clients, and repeats a failed round."""
    clock, useful, attempt = 0.0, 0.0, 0
    for number in range(1, rounds + 1):
        chosen = sample_clients(table, seed, number)
        for _ in range(MOST_ATTEMPTS):
            attempt += 1
            draw = trace.draw(attempt)
            if not draw.fails[chosen].any():
                clock += float(draw.seconds[chosen].max())
                useful += float(draw.seconds[chosen].sum())
                break
            failures = draw.failure_seconds[chosen][draw.fails[chosen]]
            clock += float(failures.min()) + table.trace.recovery_seconds
        else:
            return 0.0
    return useful / (table.sample_size * clock)
