"""Parameters whose numbers lie in another order elsewhere: see `Layout.hf_forms`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .tensors import TensorRows


def as_theirs(rows: Tensor, form: Sequence[str]) -> Tensor:
    """Return some rows of a parameter as `Layout.hf_forms` has them elsewhere."""
    if "interleaved" in form:
        rows = rows.transpose(1, 2)
    if "interleaved" in form or "joined" in form:
        rows = rows.flatten(1, 2)
    return (rows.mT if "transposed" in form else rows).contiguous()


def as_ours(rows: Tensor, form: Sequence[str]) -> Tensor:
    """Return what `as_theirs` was given."""
    if "transposed" in form:
        rows = rows.mT
    if "joined" in form:
        rows = rows.reshape(len(rows), 2, -1, *rows.shape[2:])
    if "interleaved" in form:
        rows = rows.reshape(len(rows), -1, 2, *rows.shape[2:]).transpose(1, 2)
    return rows.contiguous()


@dataclass(frozen=True)
class Formed:
    """A parameter as it is elsewhere, or one from there as it is here.

    Args:
        form: of the parameter there, see `Layout.hf_forms`.
        shape: of the tensor that this is.
        is_theirs: whether the source is.
    """

    source: TensorRows
    form: tuple[str, ...]
    shape: tuple[int, ...]
    is_theirs: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.source.dtype

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        rows = self.source.read(first, last)
        return as_ours(rows, self.form) if self.is_theirs else as_theirs(rows, self.form)
