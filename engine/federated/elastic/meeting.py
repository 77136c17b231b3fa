"""What the replica groups of a quorum tell one another, and what follows from it for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ...core.errors import RecipeError


@dataclass(frozen=True)
class Notice:
    """What a replica group tells the others of a quorum.

    Attributes:
        number: number of the group.
        step: optimizer steps that its global weights have finished.
        report: numbers of its training in the round after these; None: it has not trained.
        is_new: whether it has just started, so that its weights are its own checkpoint's.
        is_patient: whether it waits for groups that are missing, if none trains.
        recipe: digest of what all groups must have alike.
        numbers: what another group needs to continue at `step`, beside tensors.
    """

    number: int
    step: int
    report: dict[str, Any] | None
    is_new: bool
    is_patient: bool
    recipe: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Meeting:
    """The replica groups of a quorum, in the order of their numbers.

    Attributes:
        notices: what they have told.
    """

    notices: tuple[Notice, ...]

    @classmethod
    def read(cls, told: Sequence[Mapping[str, Any]]) -> Self:
        """Return the meeting of groups whose notices have travelled as JSON."""
        return cls(tuple(Notice(**each) for each in told))

    @property
    def is_doubled(self) -> bool:
        """Whether two groups have the same number."""
        return len({*self.members}) < len(self.members)

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the groups, ascending."""
        return tuple(notice.number for notice in self.notices)

    @property
    def step(self) -> int:
        """The finished steps of the groups that are furthest."""
        return max(notice.step for notice in self.notices)

    @property
    def has_updates(self) -> bool:
        """Whether there is a round to finish."""
        return any(each.report for each in self._furthest)

    @property
    def reports(self) -> list[dict[str, Any] | None]:
        """What the groups tell of the round that there is to finish."""
        return [each.report if each.step == self.step else None for each in self.notices]

    @property
    def source(self) -> Notice:
        """The group whose state those receive that need one: one that trains, if there is any."""
        trains = [each for each in self._furthest if not each.is_new]
        return (trains or self._furthest)[0]

    @property
    def receivers(self) -> tuple[int, ...]:
        """The numbers of the groups that receive the state of another one."""
        behind = (each for each in self.notices if each.is_new or each.step < self.step)
        return tuple(each.number for each in behind if each is not self.source)

    @property
    def differing(self) -> tuple[int, ...]:
        """The numbers of the groups whose recipe differs from the source's."""
        return tuple(each.number for each in self.notices if each.recipe != self.source.recipe)

    def waits(self, count: int) -> bool:
        """Return whether all wait for groups that are missing of so many."""
        is_patient = all(notice.is_patient for notice in self.notices)
        return len(self.notices) < count and is_patient and not self.has_updates

    def rank_of(self, number: int) -> int:
        """Return the rank of a group among the peers."""
        return self.members.index(number)

    @property
    def _furthest(self) -> list[Notice]:
        return [each for each in self.notices if each.step == self.step]


def refuse_difference(own: Mapping[str, str], other: Mapping[str, str], number: int) -> RecipeError:
    """Return the error of a group whose recipe differs from that of the others.

    Args:
        own: digest of each key of this group's recipe.
        other: those of another group's.
        number: number of the other group.
    """
    keys = [key for key in sorted({*own, *other}) if own.get(key) != other.get(key)]
    shown = ", ".join(keys[:8]) + f", and {len(keys) - 8} more" * (len(keys) > 8)
    message = f"the recipe differs from that of replica group {number} in {shown}"
    return RecipeError(message, "start all replica groups with the same recipe")
