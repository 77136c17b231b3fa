"""Describes the process groups of a mesh: ranks, links, bytes of collectives. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..parallel.mesh import AXES, EXPERT_AXES, GRADIENT_AXES, Degrees

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, BROADCAST = "all-to-all", "broadcast"
SEND_NEXT, SEND_PREVIOUS = "send to next", "send to previous"

INSIDE, ACROSS = "inside nodes", "across nodes"
ALL_SHOWN = 32
"""the largest world size for which a plan lists the coordinates of all ranks"""


@dataclass(frozen=True)
class Group:
    """A process group of one or more mesh axes.

    Attributes:
        axes: the mesh axes along which the ranks of a group differ.
        ranks: the size of one group.
        groups: the number of such groups in the mesh.
        first: up to 16 ranks of the first group.
        link: `INSIDE` if every group stays inside a node, else `ACROSS`.
    """

    axes: tuple[str, ...]
    ranks: int
    groups: int
    first: tuple[int, ...]
    link: str


def shown_ranks(degrees: Degrees) -> list[int]:
    """Return the ranks whose coordinates a plan lists: all, or the corners of a large mesh."""
    if degrees.world <= ALL_SHOWN:
        return list(range(degrees.world))
    corners = [0]
    for axis in AXES:
        ends = sorted({0, getattr(degrees, axis) - 1})
        corners = [rank * getattr(degrees, axis) + end for rank in corners for end in ends]
    return corners


def mesh_groups(degrees: Degrees, gpus_per_node: int, *, sharded: bool) -> Iterator[Group]:
    """Yield the process groups of a mesh: one axis each, the gradient axes together, and all axes.

    Args:
        degrees: the size of each axis of the mesh.
        gpus_per_node: the number of ranks in a node.
        sharded: True if FSDP shards parameters over the data-parallel ranks.
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
    """Return the members of a process group, ascending along the axes.

    Args:
        degrees: the size of each axis of the mesh.
        along: the axes along which the members differ; expert axes use the expert mesh.
        rank: the member whose coordinates on these axes are 0.
    """
    members, stride = [rank], 1
    # The last axis of a mesh varies fastest with the rank.
    for axis in reversed(EXPERT_AXES if set(along) <= set(EXPERT_AXES) else AXES):
        degree = getattr(degrees, axis)
        if axis in along:
            members = [each + step * stride for each in members for step in range(degree)]
        stride *= degree
    return members


def link_of(degrees: Degrees, rank: int, axes: Sequence[str], kind: str, gpus_per_node: int) -> str:
    """Return `INSIDE` if a collective of a rank stays inside the rank's node, else `ACROSS`.

    Args:
        degrees: the size of each axis of the mesh.
        rank: the first rank of a pipeline coordinate.
        axes: the mesh axes of the process group.
        kind: the collective, or a send to the next or previous stage.
        gpus_per_node: the number of ranks in a node.
    """
    members = members_of(degrees, axes, 0 if "pipeline" in axes else rank)
    if kind.startswith("send"):
        step = 1 if kind == "send to next" else -1
        members = [rank, members[(members.index(rank) + step) % len(members)]]
    return link_among(members, gpus_per_node)


def link_among(ranks: Iterable[int], gpus_per_node: int) -> str:
    """Return `INSIDE` if all of these ranks are in one node, else `ACROSS`."""
    return INSIDE if len({rank // gpus_per_node for rank in ranks}) == 1 else ACROSS


def ring_bytes(kind: str, message_bytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends to its neighbour during a ring collective.

    The ring is the bandwidth-optimal one (Patarasuk and Yuan 2009, JPDC 69(2)): an all-reduce is a
    reduce-scatter followed by an all-gather, each of `ranks - 1` steps.

    Args:
        kind: the collective.
        message_bytes: the size of the rank's input: a shard for an all-gather, else the whole
            tensor.
        ranks: the size of the process group.
    """
    if kind in (SEND_NEXT, SEND_PREVIOUS):
        return message_bytes
    if kind == ALL_GATHER:
        return (ranks - 1) * message_bytes
    rounds = 2 if kind == ALL_REDUCE else 1
    return -(-rounds * (ranks - 1) * message_bytes // ranks)
