"""Batches of distillation: rows of tokens with what the teacher says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from ...data.batch import TokenBatch


@dataclass(frozen=True)
class DistillationBatch(TokenBatch):
    """Rows of tokens, and what the teacher says of them; all None before it has seen the rows.

    Attributes:
        teacher_hidden: [B, S, E], hidden states after the last norm.
        teacher_tokens: [B, S, k], with `task.top_k` in their place: the likeliest tokens at each
            position.
        teacher_log_probs: [B, S, k], the log-probabilities of these at the loss's temperature.
    """

    teacher_hidden: Tensor | None = None
    teacher_tokens: Tensor | None = None
    teacher_log_probs: Tensor | None = None

    @property
    def is_taught(self) -> bool:
        """Whether the teacher has seen the rows."""
        return self.teacher_hidden is not None or self.teacher_tokens is not None

    def split_sequence(self, take: Callable[[Tensor], Tensor]) -> Self:
        """Return a rank's positions; see `TokenBatch.split_sequence`."""
        mine = super().split_sequence(take)
        if self.teacher_tokens is None or self.teacher_log_probs is None:
            return mine
        tokens, log_probs = map(take, (self.teacher_tokens, self.teacher_log_probs))
        return replace(mine, teacher_tokens=tokens, teacher_log_probs=log_probs)
