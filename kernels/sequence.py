"""Sequences whose positions may be divided over ranks: sums over whole sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SequenceShard:
    """The positions of each sequence that this rank computes: all, unless a subclass differs.

    Attributes:
        ranks: number of ranks that share a sequence.
        rank: this rank's number among them.
    """

    ranks: int = 1
    rank: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this rank tells what is the same on all of them."""
        return self.rank == 0

    def sum_(self, x: Tensor) -> Tensor:
        """Replace values by their sum over the ranks that share sequences; return them."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; its gradient goes to this rank's values as it is.

        Right where all ranks compute the same of the sum, and each keeps its own gradient.
        """
        if self.ranks == 1:
            return x
        own = x.detach()
        return x + (self.sum_(own.clone()) - own)


WHOLE_SEQUENCES = SequenceShard()
"""all positions on this rank"""
