"""Which weights and states a round averages: fragments, schedules and policies of layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from ...core.errors import Problem, RecipeError, nearest
from ...core.text.expressions import match_names
from ..tables import Federation
from .fragments import divide_weights
from .tables import PARAMETERS, StateSchedule


class Masks:
    """Tells what travels in a round: a pure function of the recipe and the round's number.

    Args:
        table: the recipe's `[federation]`.
        names: the names of all trained weights, in the order of the model.
        frozen: the names of the weights that no client trains.

    Attributes:
        personal: the weights that are never averaged.
        period: rounds after which what travels repeats.
        kept: the weights of which clients keep their own between rounds.

    Raises:
        RecipeError: an entry matches no weight.
    """

    def __init__(self, table: Federation, names: Sequence[str], frozen: Sequence[str] = ()) -> None:
        self.fragments = divide_weights(names, table.fragments)
        _require_matches(table, [*names, *frozen])
        found = {name: table.policy_of(name) for name in names}
        policies = {name: each for name, each in found.items() if each}
        self.personal = frozenset(n for n, each in policies.items() if each.policy == "personal")
        self._random = {n: each.interval for n, each in policies.items() if each.policy == "random"}
        self._schedules = {name: _schedules_of(table.states, name) for name in names}
        partial = {name for name, each in self._schedules.items() if PARAMETERS in each}
        self.kept = frozenset(names if table.fragments.is_enabled else self.personal | partial)
        intervals = [each.interval for each in table.states]
        self.period = lcm(len(self.fragments), *intervals)
        self._merges = dict.fromkeys(names, 0)
        self._counted = 0

    def merged_in(self, number: int) -> frozenset[str]:
        """Return the names of the weights that a round merges; rounds are counted from 1."""
        fragment = self.fragments[(number - 1) % len(self.fragments)]
        return frozenset(
            name for name in fragment - self.personal if self.is_averaged(PARAMETERS, name, number)
        )

    def merged_since(self, first: int, last: int) -> frozenset[str]:
        """Return the names of the weights that were merged in rounds `first` to `last`."""
        return frozenset().union(*(self.merged_in(number) for number in range(first, last + 1)))

    def is_averaged(self, state: str, name: str, number: int) -> bool:
        """Return whether a round averages a tensor: whether any entry that matches it is due.

        Weights that no entry matches are averaged in each round, other states never.

        Args:
            state: "parameters", or the name of a state of the optimizer.
            name: the name of the weight.
            number: number of the round, counted from 1.
        """
        entries = self._schedules[name].get(state)
        if entries is None:
            return state == PARAMETERS
        return any(entry.is_due(number) for entry in entries)

    def is_averaged_since(self, state: str, name: str, first: int, last: int) -> bool:
        """Return whether any of the rounds `first` to `last` averaged a tensor."""
        return any(self.is_averaged(state, name, each) for each in range(first, last + 1))

    def count_merges(self, name: str, number: int) -> int:
        """Return in how many rounds up to this one a weight was merged."""
        while self._counted < number:
            self._counted += 1
            for each in self.merged_in(self._counted):
                self._merges[each] += 1
        return self._merges[name]

    def drawn_before(self, number: int) -> list[str]:
        """Return the weights that are drawn again before a round."""
        return [
            name
            for name, interval in self._random.items()
            if number > 1 and (number - 1) % interval == 0
        ]


def _schedules_of(entries: Sequence[StateSchedule], name: str) -> dict[str, list[StateSchedule]]:
    """Return the entries that match a weight, by state."""
    found: dict[str, list[StateSchedule]] = {}
    for entry in entries:
        if match_names(entry.match)(name):
            found.setdefault(entry.state, []).append(entry)
    return found


def _require_matches(table: Federation, names: Sequence[str]) -> None:
    """Refuse entries that match no weight.

    Raises:
        RecipeError: there are some.
    """
    problems = []
    for key, patterns in {
        "layers": [each.match for each in table.layers],
        "states": [each.match for each in table.states],
    }.items():
        for index, pattern in enumerate(patterns):
            if not any(map(match_names(pattern), names)):
                hint = nearest(pattern, names) or f"weights are named like {names[0]}"
                message = f"{pattern} matches no weight"
                problems.append(Problem(message, f"federation.{key}.{index}.match", hint=hint))
    if problems:
        raise RecipeError(problems)
