"""The loss of one forward pass: what is minimised, and the task's own part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...model_zoo.loss import LossRecord, sum_by_source
from ..data.batch import IGNORED

if TYPE_CHECKING:
    from ...model_zoo.loss import LossFunction
    from ..data.batch import Batch


def count_tokens(batch: Batch, num_sources: int = 0) -> Tensor:
    """Return how many labels count, in all and by source, int64 [1 + num_sources]."""
    rows = (batch.labels != IGNORED).sum(1)
    tokens = rows.sum().view(1)
    if batch.sources is None or not num_sources:
        return tokens
    return torch.cat([tokens, sum_by_source(rows, batch.sources, num_sources)])


def forward_loss(
    forward: Callable[..., Tensor], batch: Batch, loss: LossFunction, num_sources: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a batch that is minimised, and what `LossRecord.sums` makes of it.

    Args:
        forward: the model, or what wraps it.
        batch: on the model's device.
        loss: of the recipe.
        num_sources: see `LossRecord.sums`.
    """
    record = LossRecord(loss)
    total = forward(
        batch.tokens,
        labels=batch.labels,
        loss=record,
        positions=batch.positions,
        document_ids=batch.document_ids,
        **({} if batch.padding_mask is None else {"padding_mask": batch.padding_mask}),
    )
    return total, record.sums(total, batch.sources, num_sources)
