"""How ranks share one parameter, for what needs whole matrices. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ...model_zoo.matrices import HeadRows

OWNED = "@"
"""In the key of a state, it comes before the number of the matrix: the state is that of one matrix,
whole on the rank that owns the matrix, and absent on others."""
Range = tuple[int, int]
"""first index, and the index after the last one"""


class DimSplit(NamedTuple):
    """A dim of a parameter that ranks split as `torch.chunk` does.

    Attributes:
        dim: the dim.
        ranks: the number of chunks.
        stride: distance between the ranks of neighbouring chunks in the process group.
    """

    dim: int
    ranks: int
    stride: int


class Matrix(NamedTuple):
    """One of the matrices that a parameter is made of.

    Attributes:
        place: index along each of the leading dims of the parameter.
        rows: the rows of the parameter's last two dims.
        columns: the number of columns, all of which belong to the matrix.
        number: counts the matrices of the parameter.
    """

    place: tuple[int, ...]
    rows: Range
    columns: int
    number: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of columns."""
        return self.rows[1] - self.rows[0], self.columns


@dataclass(frozen=True)
class ParameterPlacement:
    """How the ranks of a process group store one parameter.

    Attributes:
        name: the parameter's name in the model.
        shape: the parameter's global shape.
        is_matrix: whether it is a matrix, or a stack of matrices in its last two dims, that maps
            hidden states; False for embeddings, heads, norms and biases.
        splits: the dims that ranks split, in the order in which they are split. Ranks that differ
            in none of these hold the same.
        ranks: the number of ranks of the group.
        rank: this rank in the group.
        group: the process group of all ranks that hold a part of the parameter; None: this rank
            is alone.
        heads: how the rows belong to heads of attention; None: they do not.
        block_rows: the numbers of rows of the matrices that each matrix of the parameter joins,
            such as the heads of a projection of queries; empty: it is one matrix.
    """

    name: str
    shape: tuple[int, ...]
    is_matrix: bool = True
    splits: tuple[DimSplit, ...] = ()
    ranks: int = 1
    rank: int = 0
    group: ProcessGroup | None = None
    heads: HeadRows | None = None
    block_rows: tuple[int, ...] = ()

    def part(self, rank: int) -> tuple[Range, ...]:
        """Return the range of each dim that a rank of the group holds; it may be empty."""
        ranges = [(0, size) for size in self.shape]
        for dim, ranks, stride in self.splits:
            first, end = ranges[dim]
            # Rounded up as torch.chunk does, so that the last chunks may be short or empty.
            chunk = -(-(end - first) // ranks)
            first = min(end, first + rank // stride % ranks * chunk)
            ranges[dim] = first, min(end, first + chunk)
        return tuple(ranges)

    @property
    def num_matrices(self) -> int:
        """The number of matrices."""
        return prod(self.shape[:-2]) * max(1, len(self.block_rows))

    def matrices(self) -> Iterator[Matrix]:
        """Yield the matrices of the parameter, which has two dims or more."""
        *leading, rows, columns = self.shape
        number = 0
        for place in product(*map(range, leading)):
            first = 0
            for count in self.block_rows or (rows,):
                yield Matrix(place, (first, first + count), columns, number)
                first, number = first + count, number + 1
