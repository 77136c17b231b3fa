"""The contract between a model and the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers.cache import KVCache
from .layers.head import LossFunction as LossFunction


@dataclass(frozen=True)
class Normal:
    """Initial values: normal with this standard deviation, cut off at three of them."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initial values: all the same."""

    value: float


class LanguageModel(nn.Module):
    """A causal language model as one would write it for one device.

    Weights are kept in fp32 (or as loaded); layers cast them to the dtype of their input, and the
    embedding's output is cast to `compute_dtype`, so that this one attribute sets the precision.
    """

    compute_dtype: torch.dtype = torch.float32
    elsewhere: Mapping[str, tuple[int, ...]] = {}
    """names and shapes of parameters that other ranks have instead of this one"""
    takes_padding: bool = False
    """whether `forward` takes `padding_mask`"""
    own_positions: Callable[[Tensor], Tensor] = staticmethod(lambda whole: whole)
    """[B, S] of whole rows -> the part that blocks work on, where ranks share a row"""
    buffers_elsewhere: Mapping[str, tuple[int, ...]] = {}
    """the same of saved buffers"""

    def forward(
        self,
        tokens: Tensor | None,
        *,
        labels: Tensor | None = None,
        loss: LossFunction | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        hidden: Tensor | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        """Return logits, or the summed loss if `labels` and `loss` are given.

        A model that can be cut into a pipeline's stages also computes some of its blocks alone.

        Args:
            tokens: [B, S] token numbers.
            labels: [B, S] what each position should predict; -100 is not counted.
            loss: (hidden [T, D], head weight [V, D], labels [T]) -> sum over tokens, fp32 scalar.
                It is called for the labels first, then for what else the model learns to predict.
            positions: [B, S] position of each token in its document; default 0..S-1.
            document_ids: [B, S] attention stays inside runs of equal numbers; default: no borders.
            padding_mask: [B, S] bool of whole rows, True at filler, which belongs to no document:
                experts take no such token, and routers do not count it; default: there is none.
            cache: keys and values of earlier positions, extended in place; each stage has its own.
            hidden: [B, S, D] what the blocks before `blocks` made, in place of tokens.
            blocks: which to compute; the number after the last one's is the head; default: all.

        Returns:
            [B, S, V] logits in fp32, or the scalar loss; [B, S, D] hidden states if `blocks` ends
            before the head.
        """
        raise NotImplementedError

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return what is saved with the weights and not trained, by name."""
        saved = self.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.named_buffers() if name in saved}

    @property
    def saved_elsewhere(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all that is saved and that other ranks have instead of this one."""
        return {**self.elsewhere, **self.buffers_elsewhere}

    def initial_values(self, name: str) -> Normal | Constant:
        """Return the rule by which the parameter `name` starts."""
        raise NotImplementedError

    def init_buffers(self, device: torch.device) -> None:
        """Compute the buffers that are not saved (such as rotary tables) on `device`."""
        raise NotImplementedError
