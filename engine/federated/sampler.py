"""Which clients train in a round: a pure function of the seed and the round."""

from __future__ import annotations

from math import floor

import numpy as np

from .arrivals.tables import dropouts
from .arrivals.trace import ClientTrace
from .tables import Federation


def sample_clients(table: Federation, seed: int, number: int) -> list[int]:
    """Return the numbers of the clients of a round, ascending.

    A run that resumes needs no state of it: each round has a generator of its own.

    Args:
        table: the recipe's `[federation]`.
        seed: the recipe's `run.seed`.
        number: number of the round, counted from 1.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, number]))
    drawn = random.choice(table.num_clients, table.sample_size, replace=False)
    # At least one answers: a round without clients would change nothing.
    dropped = min(floor(table.dropout * len(drawn)), len(drawn) - 1)
    dropout = dropouts[table.dropout_function].model_validate({})
    trace = ClientTrace(table.trace, table.num_clients, 1, 0.0, seed)
    order = [int(client) for client in drawn]
    return sorted(dropout.select(order, trace.speeds.tolist(), len(order) - dropped))
