"""Process groups of a mesh: their ranks, links, and the bytes of their collectives. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..parallel.mesh import AXES, EXPERT_AXES, GRADIENT_AXES, Degrees

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, BROADCAST = "all-to-all", "broadcast"
SEND_NEXT, SEND_PREVIOUS = "send to next", "send to previous"

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


def mesh_groups(degrees: Degrees, gpus_per_node: int, *, sharded: bool) -> Iterator[Group]:
    """Yield the process groups of a mesh: of each axis, and of axes that reduce together.

    Args:
        degrees: the size of each axis of the mesh.
        gpus_per_node: the ranks that fast links join.
        sharded: parameters are split over the ranks that see different samples.
    """
    axes = [(axis,) for axis in AXES if getattr(degrees, axis) > 1]
    data = [axis for axis in GRADIENT_AXES if getattr(degrees, axis) > 1]
    if sharded:
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
    members, stride = [rank], 1
    for axis in reversed(EXPERT_AXES if set(along) <= set(EXPERT_AXES) else AXES):
        degree = getattr(degrees, axis)
        if axis in along:
            members = [each + step * stride for each in members for step in range(degree)]
        stride *= degree
    return members


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


def ring_bytes(kind: str, message_bytes: int, ranks: int) -> int:
    """Return what a rank sends to its neighbour while a ring of ranks does a collective.

    Every ring is the same bandwidth-optimal one (Patarasuk and Yuan 2009, JPDC 69(2)): an
    all-reduce is a reduce-scatter and an all-gather, each of them in `ranks - 1` steps.

    Args:
        kind: of collective.
        message_bytes: what the rank puts in.
        ranks: of the group.
    """
    if kind in (SEND_NEXT, SEND_PREVIOUS):
        return message_bytes
    if kind == ALL_GATHER:
        return (ranks - 1) * message_bytes
    rounds = 2 if kind == ALL_REDUCE else 1
    return -(-rounds * (ranks - 1) * message_bytes // ranks)
