"""Which rank orthogonalizes which matrix, and which parts of matrices ranks send each other.

Each matrix has an owner: a rank that has the whole matrix while it is orthogonalized. Matrices of
one shape form a round, so that an owner computes all of its matrices of a round in one batch.
Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..placement import Matrix, ParameterPlacement, Range

ROUND_ELEMENTS = 2**25
"""largest number of elements that an owner orthogonalizes at a time; a larger matrix comes alone"""


class Piece(NamedTuple):
    """Elements of a matrix, and where they are in a tensor of this rank.

    Attributes:
        tensor: number of the parameter, or of the matrix among those that this rank owns.
        slices: where the elements are in that tensor; the two last ones are of rows and columns.
    """

    tensor: int
    slices: tuple[int | slice, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns."""
        rows, columns = (each for each in self.slices if isinstance(each, slice))
        return rows.stop - rows.start, columns.stop - columns.start

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.shape[0] * self.shape[1]


class Transfer:
    """What this rank sends and receives in one direction.

    Args:
        sent: for each rank, the pieces that go to it.
        received: for each rank, the pieces that come from it.
        is_needed: whether any rank sends anything to another one; else each rank keeps its pieces.
    """

    def __init__(
        self, sent: Sequence[list[Piece]], received: Sequence[list[Piece]], *, is_needed: bool
    ) -> None:
        self.sent = [piece for pieces in sent for piece in pieces]
        self.received = [piece for pieces in received for piece in pieces]
        self.sent_sizes = [sum(piece.size for piece in pieces) for pieces in sent]
        self.received_sizes = [sum(piece.size for piece in pieces) for pieces in received]
        self.is_needed = is_needed


@dataclass(frozen=True)
class Round:
    """Matrices of one shape that ranks orthogonalize at the same time.

    Attributes:
        shape: the numbers of rows and of columns of each matrix.
        matrices: the matrices of all owners, in the order of ranks, each with the number of the
            parameter.
        first_owned: the number, among these, of the first matrix that this rank orthogonalizes.
        num_owned: the number of matrices that this rank orthogonalizes.
        held: for each piece of `scatter.received`, the number of the matrix, and the number of
            ranks that hold the same piece.
        gather: brings the parts of each matrix to its owner.
        scatter: brings the results to all ranks that hold a part of the parameter.
    """

    shape: tuple[int, int]
    matrices: list[tuple[int, Matrix]]
    first_owned: int
    num_owned: int
    held: list[tuple[int, int]]
    gather: Transfer
    scatter: Transfer

    @property
    def owned(self) -> list[tuple[int, Matrix]]:
        """Those of `matrices` that this rank owns."""
        return self.matrices[self.first_owned : self.first_owned + self.num_owned]


class _Storage:
    """Which ranks hold which elements of parameters that are split alike."""

    def __init__(self, placement: ParameterPlacement) -> None:
        self.parts = [placement.part(rank) for rank in range(placement.ranks)]
        self.replicas: dict[tuple[Range, ...], list[int]] = defaultdict(list)
        for rank, part in enumerate(self.parts):
            self.replicas[part].append(rank)
        self.whole: dict[Matrix, list[int]] = {}
        """the ranks that hold all of a matrix"""
        self.is_apart: dict[Matrix, bool] = {}
        """whether more ranks than one hold elements of a matrix"""
        for matrix in placement.matrices():
            held = [
                (rank, overlap[1])
                for part, ranks in self.replicas.items()
                if (overlap := overlap_of(matrix, part))
                for rank in ranks
            ]
            whole = (slice(0, matrix.shape[0]), slice(0, matrix.shape[1]))
            self.whole[matrix] = sorted(rank for rank, inside in held if inside == whole)
            self.is_apart[matrix] = len(held) > 1

    def sends(self, rank: int, owner: int) -> bool:
        """Return whether a rank, and none of its replicas, sends its part to an owner."""
        replicas = self.replicas[self.parts[rank]]
        return rank == min(replicas, key=lambda each: (abs(each - owner), each))


def overlap_of(
    matrix: Matrix, part: Sequence[Range]
) -> tuple[tuple[int | slice, ...], tuple[slice, slice]] | None:
    """Return where a part of a parameter overlaps a matrix, or None if it does not.

    Returns:
        the slices of the overlap in the part, and its slices in the matrix.
    """
    *leading, rows, columns = part
    if not all(a <= index < b for index, (a, b) in zip(matrix.place, leading, strict=True)):
        return None
    first, end = max(rows[0], matrix.rows[0]), min(rows[1], matrix.rows[1])
    if first >= end or columns[0] >= columns[1]:
        return None
    inner = [index - a for index, (a, _) in zip(matrix.place, leading, strict=True)]
    here = slice(first - rows[0], end - rows[0]), slice(0, columns[1] - columns[0])
    return (*inner, *here), (slice(first - matrix.rows[0], end - matrix.rows[0]), slice(*columns))


class OwnedMatrix(NamedTuple):
    """A matrix and its owner.

    Attributes:
        parameter: number of the parameter.
        matrix: the matrix.
        storage: which ranks hold it.
        owner: the rank that computes the update.
    """

    parameter: int
    matrix: Matrix
    storage: _Storage
    owner: int


def assign_owners(
    placements: Sequence[ParameterPlacement], loads: list[float]
) -> list[OwnedMatrix]:
    """Return the matrices of parameters with their owners, on which all ranks of the group agree.

    Args:
        placements: the placement of each parameter, in the same order on all ranks.
        loads: the cost of the matrices that each rank owns already; those assigned are added.
    """
    storages: dict[Any, _Storage] = {}
    by_shape = defaultdict[tuple[int, int], list[tuple[int, Matrix, _Storage]]](list)
    for number, placement in enumerate(placements):
        kind = placement.shape, placement.splits, placement.block_rows
        if kind not in storages:
            storages[kind] = _Storage(placement)
        for matrix in placement.matrices():
            by_shape[matrix.shape].append((number, matrix, storages[kind]))
    assigned = []
    # The costly ones first, so that the others even out the loads.
    for shape in sorted(by_shape, key=cost_of, reverse=True):
        for number, matrix, storage in by_shape[shape]:
            owner = min(storage.whole[matrix] or range(len(loads)), key=loads.__getitem__)
            assigned.append(OwnedMatrix(number, matrix, storage, owner))
            loads[owner] += cost_of(shape)
    return assigned


def plan_rounds(matrices: Sequence[OwnedMatrix], ranks: int, rank: int) -> list[Round]:
    """Return the rounds of matrices; all ranks of the group plan the same ones.

    Args:
        matrices: what `assign_owners` returned, or some of it.
        ranks: the number of ranks of the group.
        rank: this rank.
    """
    by_shape = defaultdict[tuple[int, int], list[list[OwnedMatrix]]](
        lambda: [[] for _ in range(ranks)]
    )
    for each in matrices:
        by_shape[each.matrix.shape][each.owner].append(each)
    rounds = []
    for shape, owned in by_shape.items():
        most = max(1, ROUND_ELEMENTS // (shape[0] * shape[1]))
        for first in range(0, max(map(len, owned)), most):
            chosen = [items[first : first + most] for items in owned]
            rounds.append(_plan_round(shape, chosen, rank))
    return rounds


def cost_of(shape: tuple[int, int]) -> float:
    """Return the multiplications of one Newton-Schulz iteration on a matrix."""
    low, high = sorted(shape)
    return float(2 * low * low * high + low**3)


def _plan_round(shape: tuple[int, int], owned: Sequence[Sequence[OwnedMatrix]], rank: int) -> Round:
    ranks = range(len(owned))
    in_parameters, in_matrices = ([[list[Piece]() for _ in ranks] for _ in "ab"] for _ in "ab")
    (to_owners, from_owners), (from_holders, to_holders) = in_parameters, in_matrices
    gathers = scatters = False
    matrices = list[tuple[int, Matrix]]()
    held = list[tuple[int, int]]()
    for owner, items in enumerate(owned):
        for parameter, matrix, storage, _ in items:
            gathers |= owner not in storage.whole[matrix]
            scatters |= storage.is_apart[matrix] or owner not in storage.whole[matrix]
            if overlap := overlap_of(matrix, storage.parts[rank]):
                held.append((len(matrices), len(storage.replicas[storage.parts[rank]])))
                from_owners[owner].append(Piece(parameter, overlap[0]))
                if storage.sends(rank, owner):
                    to_owners[owner].append(Piece(parameter, overlap[0]))
            matrices.append((parameter, matrix))
    # In the order of the owner's matrices, as the rank that sends them has its pieces.
    for holder in ranks:
        for number, (_, matrix, storage, _) in enumerate(owned[rank]):
            if overlap := overlap_of(matrix, storage.parts[holder]):
                to_holders[holder].append(Piece(number, (number, *overlap[1])))
                if storage.sends(holder, rank):
                    from_holders[holder].append(Piece(number, (number, *overlap[1])))
    return Round(
        shape,
        matrices,
        sum(map(len, owned[:rank])),
        len(owned[rank]),
        held,
        gather=Transfer(to_owners, from_holders, is_needed=gathers),
        scatter=Transfer(to_holders, from_owners, is_needed=scatters),
    )
