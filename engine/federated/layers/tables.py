"""The tables of what travels: policies of layers, and schedules of states. Torch-free."""

from __future__ import annotations

from typing import Literal

from ...core.config import Count, CountOrZero, Fraction, Table

PARAMETERS = "parameters"
"""the state that stands for the weights themselves"""


class LayerPolicy(Table):
    """Weights that are not averaged as the others."""

    match: str
    """which weights: a glob over names, or "re:" and a regular expression; the first entry that
    matches a name wins"""
    policy: Literal["freeze", "personal", "random"]
    """"freeze": no client trains them; "personal": each client keeps its own, and the global model
    the initial ones; "random": averaged, and drawn again at intervals (active forgetting)"""
    interval: Count = 1
    """of "random": rounds between two draws, after which the states of optimizers start again"""


class StateSchedule(Table):
    """How often a tensor is averaged over the clients (DES-LOC, arXiv:2505.22549)."""

    state: str
    """"parameters", or a state of the optimizer, such as "exp_avg" """
    match: str = "*"
    """which weights: a glob over names, or "re:" and a regular expression"""
    interval: Count = 1
    """rounds between two averages"""
    offset: CountOrZero = 0
    """rounds by which averages are later than at multiples of the interval"""

    def is_due(self, number: int) -> bool:
        """Return whether a round averages; rounds are counted from 1."""
        return number % self.interval == self.offset % self.interval


class Fragments(Table):
    """Each round merges one fragment of the weights; clients keep their own of the others."""

    count: Count = 1
    """fragments, which are merged in turn"""
    pattern: Literal["strided", "sequential"] = "strided"
    """which blocks of the model are a fragment: each count-th, or those next to one another"""
    delay: CountOrZero = 0
    """optimizer steps of the next round after which what was merged reaches the clients, so that
    training need not wait for it"""
    mixing: Fraction = 0.0
    """share of a client's own weights in the fragment with which it continues"""

    @property
    def is_enabled(self) -> bool:
        """Whether clients keep weights of their own between rounds."""
        return self.count > 1 or self.delay > 0 or self.mixing > 0
