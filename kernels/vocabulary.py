"""Logits whose columns may be divided over ranks: which classes are here, and the reductions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .softcap import softcap as cap_softly


@dataclass(frozen=True)
class VocabularyShard:
    """The classes whose logits this rank computes: all of them, unless a subclass says otherwise.

    Attributes:
        first: the class of the first column.
    """

    first: int = 0

    def max_(self, x: Tensor) -> Tensor:
        """Replace values by their maximum over the ranks that share the classes; return them."""
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """Replace values by their sum over the ranks that share the classes; return them."""
        return x

    def locate(self, classes: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return the column of each class, and whether this rank has it.

        Args:
            classes: class numbers; negative ones are on no rank.
            columns: the number of this rank's columns.

        Returns:
            the columns, 0 where the class is not here, and a bool for each.
        """
        # A class past the end stays as it is: gathering its logit raises an error.
        return classes.clamp(min=0), classes >= 0

    def top_k(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of all ranks' values [T, V], and the classes that have them."""
        # Of equal values `max` documents which one it takes: the first.
        found = values.max(-1, keepdim=True) if k == 1 else values.topk(k)
        return found.values, found.indices


WHOLE = VocabularyShard()
"""all classes on this rank"""


def project(
    hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None = None
) -> Tensor:
    """Return hidden @ weight.T / temperature in fp32 at least; the product keeps its dtype.

    With a cap the product is capped first, see `softcap.softcap`.
    """
    logits = hidden @ weight.T
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        wide = cap_softly(wide, softcap)
    return wide if temperature == 1 else wide.div_(temperature)
