"""The loss of one forward pass: what is minimised, and the task's own part of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LossFunction = Callable[..., Tensor]
"""(hidden [T, D], head weight [V, D], labels [T], -100 ignored) -> the sum over tokens that is
minimised, fp32. Given a list as `token_losses`, it appends the task's loss of each token to it,
without regularisers and without gradient: [T], in one piece or several."""


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

    def sums(self, total: Tensor, sources: Tensor | None = None, num_sources: int = 0) -> Tensor:
        """Return the sum that is minimised, the task's loss, and that by source; without gradient.

        Args:
            total: what the forward pass returned.
            sources: see `Batch`.
            num_sources: how many there are; 0: losses are not told apart.

        Returns:
            [2 + num_sources].
        """
        # As the kernel sums: without regularisers both are the same to the bit.
        task = torch.stack([each.sum() for each in self._token_losses]).sum()
        sums = torch.stack([total.detach(), task])
        if sources is None or not num_sources:
            return sums
        rows = torch.cat(self._token_losses).view(len(sources), -1).sum(1)
        return torch.cat([sums, sum_by_source(rows, sources, num_sources)])


def sum_by_source(rows: Tensor, sources: Tensor, num_sources: int) -> Tensor:
    """Return the sum of each source's rows; what is not finite stays in its own source."""
    mine = sources == torch.arange(num_sources, device=sources.device).unsqueeze(1)
    return torch.where(mine, rows, 0).sum(1)
