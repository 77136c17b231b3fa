"""Recognises the collectives of one rank among its operations, with their groups and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ....kernels.torch_private import resolve_process_group, tree_leaves
from ...parallel.mesh import AXES, Degrees
from ..groups import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER,
    SEND_NEXT,
    SEND_PREVIOUS,
)

_KINDS = {
    "allgather": ALL_GATHER,
    "reducescatter": REDUCE_SCATTER,
    "allreduce": ALL_REDUCE,
    "alltoall": ALL_TO_ALL,
    "broadcast": BROADCAST,
    "send": SEND_NEXT,
    "isend": SEND_NEXT,
}
"""the collective by the prefix of an operation's name, without underscores"""
_SILENT = ("recv", "irecv", "barrier", "monitoredbarrier", "wait", "check", "wrap")
"""prefixes of operations that send nothing; received bytes are counted at the sender"""
_MESSAGES = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensor", "tensors")


class Route(NamedTuple):
    """A collective and the process group that runs it.

    Attributes:
        axes: the mesh axes along which the ranks of the group differ; one of `EXPERT_AXES` for an
            expert group.
        kind: the collective.
        part: the number of ranks and the stride between them if the group holds only some of the
            ranks along the axes, else None.
    """

    axes: tuple[str, ...]
    kind: str
    part: tuple[int, int] | None = None


class CollectiveMatcher:
    """Recognises the collectives of one rank.

    Args:
        degrees: the size of each axis of the mesh.
        rank: the rank.

    Attributes:
        in_update: whether the optimizer runs, whose all-to-alls are among all ranks of a stage.
    """

    def __init__(self, degrees: Degrees, rank: int) -> None:
        self._degrees = degrees
        self._rank = rank
        self.in_update = False
        self._axes: dict[str, tuple[tuple[str, ...], tuple[int, int] | None]] = {}

    def match_collective(
        self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Route, int] | None:
        """Return the route and the message bytes of a collective, or None for other operations.

        The message is the rank's shard in an all-gather, and the whole tensor otherwise.

        Raises:
            KeyError: the operation is a collective that is not listed here.
        """
        if operation.namespace not in ("c10d", "_c10d_functional"):
            return None
        name = operation._opname.replace("_", "")
        if name.startswith(_SILENT):
            return None
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        if kind is None:
            raise KeyError(f"{operation}: not known how many bytes it sends")
        given = named_arguments(operation, args, kwargs)
        group = _group(given.get("process_group", given.get("group_name")))
        axes, part = self._axes_of_group(group)
        if not axes:  # a rank alone
            return None
        if kind == ALL_TO_ALL and not self.in_update:
            coordinates = map(self._degrees.coordinate, dist.get_process_group_ranks(group))
            is_inside = len({coordinate.expert for coordinate in coordinates}) == 1
            axes, part = ("expert_tensor" if is_inside else "expert",), None
        if kind == SEND_NEXT:
            steps = (given["dst"] - dist.get_group_rank(group, self._rank)) % group.size()
            kind = SEND_NEXT if steps == 1 else SEND_PREVIOUS
        message = next(given[name] for name in _MESSAGES if name in given)
        return Route(axes, kind, part), sum(tensor.nbytes for tensor in tree_leaves(message))

    def _axes_of_group(self, group: ProcessGroup) -> tuple[tuple[str, ...], tuple[int, int] | None]:
        """Return the axes and the part of a group; see `Route`."""
        name = group.group_name
        if name not in self._axes:
            ranks = dist.get_process_group_ranks(group)
            axes, part = axes_of(self._degrees, ranks), None
            if len(ranks) < prod(getattr(self._degrees, axis) for axis in axes):
                part = len(ranks), ranks[1] - ranks[0]
            self._axes[name] = axes, part
        return self._axes[name]


def axes_of(degrees: Degrees, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the axes along which ranks differ."""
    coordinates = [degrees.coordinate(rank) for rank in ranks]
    return tuple(axis for axis in AXES if len({getattr(at, axis) for at in coordinates}) > 1)


def named_arguments(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operation by the names of its schema."""
    names = (argument.name for argument in operation._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def _group(given: Any) -> ProcessGroup:
    if isinstance(given, str):
        group: ProcessGroup = resolve_process_group(given)
        return group
    return given if isinstance(given, ProcessGroup) else ProcessGroup.unbox(given)
