"""What ranks tell each other: every collective, and the bytes it puts on a link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from ...parallel.mesh import AXES, Degrees

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, BROADCAST = "all-to-all", "broadcast"
SEND_NEXT, SEND_PREVIOUS = "send to next", "send to previous"

_KINDS = {
    "allgather": ALL_GATHER,
    "reducescatter": REDUCE_SCATTER,
    "allreduce": ALL_REDUCE,
    "alltoall": ALL_TO_ALL,
    "broadcast": BROADCAST,
    "send": SEND_NEXT,
    "isend": SEND_NEXT,
}
"""how the name of an operation begins, without its underscores"""
_SILENT = ("recv", "irecv", "barrier", "monitoredbarrier", "wait", "check", "wrap")
"""operations that bring nothing to others; what is received counts where it is sent"""
_MESSAGES = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")


class Route(NamedTuple):
    """Which ranks a message goes to, and in which way.

    Attributes:
        axes: of the mesh along which these ranks differ; those that share experts differ along one
            of `EXPERT_AXES`.
        kind: of collective.
        part: how many they are and how far apart, where they are only some of those along the axes.
    """

    axes: tuple[str, ...]
    kind: str
    part: tuple[int, int] | None = None


class Call(NamedTuple):
    """One collective of one rank.

    Attributes:
        route: where the message goes.
        message_bytes: what the rank puts in: its piece of an all-gather, the whole tensor of the
            others.
    """

    route: Route
    message_bytes: int


class Listener:
    """Recognises the collectives of one rank among its operations."""

    def __init__(self, degrees: Degrees, rank: int) -> None:
        self._degrees = degrees
        self._rank = rank
        self._places: dict[str, tuple[tuple[str, ...], tuple[int, int] | None]] = {}

    def heard(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
        """Return the call that an operation is; None if it brings nothing to other ranks.

        Raises:
            KeyError: a collective that has no entry here.
        """
        if operation.namespace not in ("c10d", "_c10d_functional"):
            return None
        name = operation._opname.replace("_", "")
        if name.startswith(_SILENT):
            return None
        (kind,) = [kind for start, kind in _KINDS.items() if name.startswith(start)] or [name]
        if kind not in _KINDS.values():
            raise KeyError(f"{operation}: not known how many bytes it sends")
        names = (argument.name for argument in operation._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        group = _group(given.get("process_group", given.get("group_name")))
        axes, part = self._place_of(group)
        if not axes:  # a rank alone
            return None
        if kind == ALL_TO_ALL:
            places = map(self._degrees.coordinate, dist.get_process_group_ranks(group))
            is_inside = len({place.expert for place in places}) == 1
            axes, part = ("expert_tensor" if is_inside else "expert",), None
        if kind == SEND_NEXT:
            here = dist.get_group_rank(group, self._rank)
            steps = (given["dst"] - here) % group.size()
            kind = SEND_NEXT if steps == 1 else SEND_PREVIOUS
        message = next(given[name] for name in _MESSAGES if name in given)
        return Call(Route(axes, kind, part), sum(each.nbytes for each in _tensors(message)))

    def _place_of(self, group: ProcessGroup) -> tuple[tuple[str, ...], tuple[int, int] | None]:
        """Return the axes and the part of a group; see `Route`."""
        name = group.group_name
        if name not in self._places:
            ranks = dist.get_process_group_ranks(group)
            axes, part = axes_of(self._degrees, ranks), None
            if len(ranks) < prod(getattr(self._degrees, axis) for axis in axes):
                part = len(ranks), ranks[1] - ranks[0]
            self._places[name] = axes, part
        return self._places[name]


def axes_of(degrees: Degrees, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the axes along which ranks differ."""
    places = [degrees.coordinate(rank) for rank in ranks]
    return tuple(axis for axis in AXES if len({getattr(place, axis) for place in places}) > 1)


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


def _group(given: Any) -> ProcessGroup:
    if isinstance(given, str):
        return _resolve_process_group(given)  # type: ignore[arg-type]
    return given if isinstance(given, ProcessGroup) else ProcessGroup.unbox(given)


def _tensors(message: Any) -> Iterable[Tensor]:
    if isinstance(message, Tensor):
        yield message
    else:
        for each in message:
            yield from _tensors(each)
