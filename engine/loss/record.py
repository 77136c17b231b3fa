"""The loss of one forward pass: what is minimised, and the task's own part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..data.batch import Batch
    from .configs import LossFunction


class LossRecord:
    """A loss function for one forward pass that keeps the loss of each token.

    A model calls it for its labels first. Later calls are for what the model learns besides, such
    as tokens farther ahead: they are minimised, and no part of the task's loss.
    """

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._token_losses: list[Tensor] = []

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the sum that is minimised; see `LanguageModel.forward`."""
        if self._token_losses:
            return self._loss(hidden, weight, labels)
        return self._loss(hidden, weight, labels, token_losses=self._token_losses)

    def sums(self, total: Tensor) -> Tensor:
        """Return the sum that is minimised and the task's loss, [2], without gradient.

        Args:
            total: what the forward pass returned.
        """
        # As the kernel sums: without regularisers both are the same to the bit.
        task = torch.stack([each.sum() for each in self._token_losses]).sum()
        return torch.stack([total.detach(), task])


def forward_loss(
    forward: Callable[..., Tensor], batch: Batch, loss: LossFunction
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a batch that is minimised, and what `LossRecord.sums` makes of it.

    Args:
        forward: the model, or what wraps it.
        batch: on the model's device.
        loss: of the recipe.
    """
    record = LossRecord(loss)
    total = forward(
        batch.tokens,
        labels=batch.labels,
        loss=record,
        positions=batch.positions,
        document_ids=batch.document_ids,
    )
    return total, record.sums(total)
