"""The criterion of distillation: a divergence from the teacher, and the cross entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....kernels.choose import Kernels
from ....kernels.divergence.reference import (
    Divergence,
    linear_divergence,
    linear_sparse_divergence,
)
from ...data.batch import IGNORED


@dataclass(frozen=True)
class SoftCriterion:
    """The loss of a token: a divergence from the teacher, and the cross entropy with its label.

    Attributes:
        divergence: of the student's distribution from the teacher's.
        temperature: both models' logits are divided by it. The divergence is multiplied by its
            square, so that its gradients keep their size (Hinton et al. 2015, arXiv:1503.02531,
            section 2).
        hard_weight: share of the cross entropy.
        kernels: the implementations of this rank.
        top_k: how many of the teacher's likeliest tokens are told apart; all others count as one.
            0: all are.
    """

    divergence: Divergence
    temperature: float
    hard_weight: float
    kernels: Kernels
    top_k: int = 0

    @property
    def weights(self) -> tuple[float, float]:
        """What multiplies the divergence and the cross entropy."""
        return (1 - self.hard_weight) * self.temperature**2, self.hard_weight

    def compute(
        self,
        student: tuple[Tensor, Tensor],
        teacher: tuple[Tensor, Tensor],
        labels: Tensor,
        softcaps: tuple[float | None, float | None] = (None, None),
    ) -> Tensor:
        """Return the summed divergence and the summed cross entropy, [2].

        Args:
            student: hidden states [T, D] and head weight [V, D].
            teacher: hidden states [T, E] and head weight [V, E]; with `top_k` tokens [T, k] and
                their log-probabilities at the temperature.
            labels: [T], -100 ignored.
            softcaps: what the student's and the teacher's logits are capped at.
        """
        softcap = softcaps[0]
        settings: dict[str, Any] = {
            "divergence": self.divergence,
            "temperature": self.temperature,
            "shard": self.kernels.vocabulary,
        }
        if self.top_k:
            tokens, log_probs = teacher[0].long(), teacher[1]
            soft = linear_sparse_divergence(
                student, tokens, log_probs, labels != IGNORED, softcap=softcap, **settings
            ).sum()
        else:
            counted = labels != IGNORED
            soft = linear_divergence(student, teacher, counted, softcaps=softcaps, **settings)
        # A validation always tells the cross entropy; a step computes it if it is minimised.
        if self.hard_weight or not torch.is_grad_enabled():
            capped = {} if softcap is None else {"softcap": softcap}
            hard = self.kernels.linear_cross_entropy(*student, labels, **capped)
            return torch.stack([soft, hard])
        return torch.stack([soft, torch.zeros_like(soft)])
