"""Durations and failures of clients: pure functions of the recipe, the seed and the round."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Problem, RecipeError
from ...core.files import open_regular
from .tables import Trace

# Keys of the generators: rounds have numbers below.
SPEEDS, ROUNDS = 2**40, 2**41


@dataclass(frozen=True)
class RoundDraw:
    """What happens to the clients in a round, each [clients].

    Attributes:
        seconds: from the start of the round to the arrival of the update.
        fails: whether the client fails.
        failure_seconds: from the start of the round to the failure.
    """

    seconds: NDArray[np.float64]
    fails: NDArray[np.bool_]
    failure_seconds: NDArray[np.float64]


class ClientTrace:
    """Draws durations and failures.

    Args:
        table: the recipe's `[federation.trace]`.
        clients: number of clients.
        steps: optimizer steps of a client in a round.
        transfer_bits: bits that a client receives and sends in a round.
        seed: the recipe's `run.seed`.
        names: what rows of metrics call the clients, where they are replayed.

    Raises:
        RecipeError: the file of the trace cannot be read.
    """

    def __init__(
        self,
        table: Trace,
        clients: int,
        steps: int,
        transfer_bits: float,
        seed: int,
        names: list[str] | None = None,
    ) -> None:
        self._table = table
        self._seed = seed
        random = np.random.Generator(np.random.Philox(key=[seed, SPEEDS]))
        self.speeds = np.exp(table.spread * random.standard_normal(clients))
        self._base = steps * table.step_seconds
        self._transfer = transfer_bits / table.bandwidth if table.bandwidth else 0.0
        self._recorded = _read(table.file, names or []) if table.file else {}

    def draw(self, number: int) -> RoundDraw:
        """Return what happens in a round; rounds are counted from 1."""
        table, count = self._table, len(self.speeds)
        random = np.random.Generator(np.random.Philox(key=[self._seed, ROUNDS + number]))
        jitter = np.exp(table.jitter * random.standard_normal(count))
        seconds = self._base * jitter / self.speeds
        for client, recorded in self._recorded.get(number, {}).items():
            seconds[client] = recorded
        fails, moment = random.random(count) < table.failure, random.random(count)
        return RoundDraw(seconds + self._transfer, fails, seconds * moment)


def _read(file: str, names: list[str]) -> dict[int, dict[int, float]]:
    """Return the seconds of the rows of a file, by round and client."""
    numbers = {name: index for index, name in enumerate(names)}
    found = dict[int, dict[int, float]]()
    try:
        with open_regular(os.path.expanduser(file)) as lines:
            for row in map(json.loads, lines):
                if row.get("kind") == "client" and row["client"] in numbers:
                    of_round = found.setdefault(int(row["round"]), {})
                    of_round[numbers[row["client"]]] = float(row["seconds"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        message = f"{file}: no rows of metrics: {error}"
        raise RecipeError([Problem(message, "federation.trace.file")]) from error
    return found
