"""The end of a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.choose import Kernels
from .linear import Linear
from .norm import RMSNorm

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class Prediction(NamedTuple):
    """What else a model shall learn to predict.

    Attributes:
        hidden: [B, S, D], normed.
        labels: [B, S], as those of `LanguageModel.forward`.
        weight: of its loss.
    """

    hidden: Tensor
    labels: Tensor
    weight: float


class Head(nn.Module):
    """Final norm, and the projection to logits or to the loss.

    Norm, projection and loss are one module, so that whoever shards weights gathers them once.

    Args:
        dim: width of the residual stream.
        vocab_size: rows of the projection; None where it uses the embedding's weight.
        norm_eps: see `RMSNorm`.
        kernels: the implementations.
    """

    def __init__(self, dim: int, vocab_size: int | None, norm_eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, norm_eps, kernels)
        self.proj = None if vocab_size is None else Linear(dim, vocab_size)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        loss: LossFunction | None = None,
        tied_weight: Tensor | None = None,
        *,
        ahead: Callable[[Tensor], Iterator[Prediction]] | None = None,
    ) -> Tensor:
        """Return [B, S, V] logits in fp32, or the summed loss if `labels` and `loss` are given.

        Args:
            x: [B, S, D].
            labels: [B, S].
            loss: see `LanguageModel.forward`.
            tied_weight: [V, D], the embedding's weight where there is no projection of its own.
            ahead: normed hidden states -> what else the same weight predicts: a part of the sum.
        """
        weight_VD = tied_weight if self.proj is None else self.proj.weight
        assert weight_VD is not None, "a head without projection needs the embedding's weight"
        x_BSD = self.norm(x)
        if labels is None or loss is None:
            return F.linear(x_BSD, weight_VD.to(x_BSD.dtype)).float()
        total = loss(x_BSD.flatten(0, 1), weight_VD, labels.flatten())
        for also in ahead(x_BSD) if ahead else ():
            # In this module, so that whoever shards weights still gathers them once.
            found = loss(also.hidden.flatten(0, 1), weight_VD, also.labels.flatten())
            total = total + also.weight * found
        return total
