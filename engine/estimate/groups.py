"""The mesh of a run: who is where, who talks to whom, and over which link. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..parallel.mesh import AXES, EXPERT_AXES, GRADIENT_AXES, Degrees

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

INSIDE, ACROSS = "inside nodes", "across nodes"
ALL_SHOWN = 32
"""ranks whose coordinates are all given"""


@dataclass(frozen=True)
class Group:
    """A process group of one or more mesh axes.

    Attributes:
        axes: along which they differ.
        ranks: of one group.
        groups: how many there are.
        first: the ranks of the first group, up to 16.
        link: whether all groups stay inside nodes.
    """

    axes: tuple[str, ...]
    ranks: int
    groups: int
    first: tuple[int, ...]
    link: str


def shown_ranks(degrees: Degrees) -> list[int]:
    """Return all ranks of a small mesh, and the corners of a large one."""
    if degrees.world <= ALL_SHOWN:
        return list(range(degrees.world))
    corners = [0]
    for axis in AXES:
        ends = sorted({0, getattr(degrees, axis) - 1})
        corners = [rank * getattr(degrees, axis) + end for rank in corners for end in ends]
    return corners


def mesh_groups(recipe: Recipe, degrees: Degrees, gpus_per_node: int) -> Iterator[Group]:
    """Yield the groups that talk: along each axis, and along those that work together."""
    axes = [(axis,) for axis in AXES if getattr(degrees, axis) > 1]
    data = [axis for axis in GRADIENT_AXES if getattr(degrees, axis) > 1]
    if recipe.parallel.is_sharded(degrees):
        data = [axis for axis in data if axis != "replicate"]
    for along in dict.fromkeys([*axes, tuple(data), *([tuple(a for (a,) in axes)])]):
        if along:
            starts = members_of(degrees, [axis for axis in AXES if axis not in along], 0)
            first = tuple(sorted(members_of(degrees, along, 0)))
            inside = all(
                start // gpus_per_node == (start + first[-1]) // gpus_per_node for start in starts
            )
            yield Group(along, len(first), len(starts), first[:16], INSIDE if inside else ACROSS)
    for axis in EXPERT_AXES:
        if (ranks := getattr(degrees, axis)) > 1:
            firsts = (n for n in range(degrees.world) if not getattr(degrees.coordinate(n), axis))
            groups = [members_of(degrees, [axis], first) for first in firsts]
            links = {link_among(group, gpus_per_node) for group in groups}
            link = INSIDE if links == {INSIDE} else ACROSS
            yield Group((axis,), ranks, len(groups), tuple(groups[0][:16]), link)


def members_of(degrees: Degrees, along: Sequence[str], rank: int) -> list[int]:
    """Return the ranks that differ from the lowest of them, `rank`, along some axes alone."""
    found, stride = [rank], 1
    for axis in reversed(EXPERT_AXES if set(along) <= set(EXPERT_AXES) else AXES):
        degree = getattr(degrees, axis)
        if axis in along:
            found = [each + step * stride for each in found for step in range(degree)]
        stride *= degree
    return found


def link_of(degrees: Degrees, rank: int, axes: Sequence[str], kind: str, gpus_per_node: int) -> str:
    """Return whether a rank's group, or the one that it sends to, is in its node."""
    members = members_of(degrees, axes, 0 if "pipeline" in axes else rank)
    if kind.startswith("send"):
        step = 1 if kind == "send to next" else -1
        members = [rank, members[(members.index(rank) + step) % len(members)]]
    return link_among(members, gpus_per_node)


def link_among(ranks: Iterable[int], gpus_per_node: int) -> str:
    """Return whether all of these ranks are in one node."""
    return INSIDE if len({rank // gpus_per_node for rank in ranks}) == 1 else ACROSS
