"""The heads of decoders: final norm, and the projection to logits of tokens or of other outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ...kernels.softcap import softcap as cap_softly
from ..heads import HeadSettings
from ..language_model import LossFunction
from .dense import Linear, RMSNorm
from .dropout import drop


class FurtherTarget(NamedTuple):
    """Labels that a model learns to predict beside the next token.

    Attributes:
        hidden: [B, S, D], hidden states after a norm, which the head's weight is applied to.
        labels: [B, S], as those of `LanguageModel.forward`.
        weight: factor of the loss for these labels.
    """

    hidden: Tensor
    labels: Tensor
    weight: float


class Head(nn.Module):
    """Final norm, and the projection to logits or to the loss.

    Norm, projection and loss are one module, so that FSDP gathers their weights once.

    Args:
        dim: width of the residual stream.
        vocab_size: rows of the projection; None where it uses the embedding's weight.
        norm_eps: see `RMSNorm`.
        kernels: the implementations.
        softcap: the softcap of logits, see `kernels.softcap`; None: logits are not capped.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int | None,
        norm_eps: float,
        kernels: Kernels,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        # Only where it is set, so that a loss without it serves other models.
        self.loss_settings = {} if softcap is None else {"softcap": softcap}
        self.softcap = softcap
        self.norm = RMSNorm(dim, norm_eps, kernels)
        self.proj = None if vocab_size is None else Linear(dim, vocab_size)

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        loss: LossFunction | None = None,
        tied_weight: Tensor | None = None,
        *,
        further_targets: Callable[[Tensor], Iterator[FurtherTarget]] | None = None,
    ) -> Tensor:
        """Return [B, S, V] logits in fp32, or the summed loss if `labels` and `loss` are given.

        Args:
            x: [B, S, D].
            labels: [B, S].
            loss: see `LanguageModel.forward`.
            tied_weight: [V, D], the embedding's weight where there is no projection of its own.
            further_targets: maps the normed hidden states to targets whose losses are added, such
                as those of multi-token prediction.
        """
        weight_VD = tied_weight if self.proj is None else self.proj.local("weight")
        assert weight_VD is not None, "a head without projection needs the embedding's weight"
        x_BSD = self.norm(x)
        if labels is None or loss is None:
            # Cast after the product: what reads the logits sums in fp32.
            logits = _widen(F.linear(x_BSD, weight_VD.to(x_BSD.dtype)))
            return logits if self.softcap is None else cap_softly(logits, self.softcap)
        # Without logits: the loss gets weight and hidden states, and may make logits in pieces.
        settings = self.loss_settings
        total = loss(x_BSD.flatten(0, 1), weight_VD, labels.flatten(), **settings)
        for target in further_targets(x_BSD) if further_targets else ():
            # In this module, so that sharded weights are still gathered once.
            hidden_TD = target.hidden.flatten(0, 1)
            further = loss(hidden_TD, weight_VD, target.labels.flatten(), **settings)
            total = total + target.weight * further
        return total


class ClassificationHead(nn.Module):
    """Final norm and a linear layer, for all positions.

    Args:
        dim: width of the residual stream.
        settings: the layer's.
        norm_eps: see `RMSNorm`.
        kernels: the implementations.
    """

    def __init__(self, dim: int, settings: HeadSettings, norm_eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.settings = settings
        self.norm = RMSNorm(dim, norm_eps, kernels)
        self.add_module(settings.layer, Linear(dim, settings.outputs, bias=settings.bias))

    def forward(
        self,
        x: Tensor,
        loss: Callable[[Tensor], Tensor] | None = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Return [B, S, outputs] logits in fp32, or what `loss` makes of them.

        Args:
            x: [B, S, D].
            loss: maps logits to the sums that are minimised.
            dropout_keys: see `drop`.
        """
        x_BSD = self.norm(x)
        if self.training and self.settings.dropout:
            x_BSD = drop(x_BSD, self.settings.dropout, dropout_keys)
        # Cast after the product: what reads the logits sums in fp32.
        logits = _widen(self.get_submodule(self.settings.layer)(x_BSD))
        return logits if loss is None else loss(logits)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
