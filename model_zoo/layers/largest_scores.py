"""The largest attention scores of a layer's heads in training, for optimizers that bound them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.attention.local import Mask
from ...kernels.choose import Kernels


class LargestScores:
    """Keeps the largest scores of passes that train; nothing is computed before `keep_in`."""

    def __init__(self, kernels: Kernels) -> None:
        self._compute = kernels.largest_scores
        self._found_H: Tensor | None = None

    def keep_in(self, found: Tensor) -> None:
        """Raise numbers to the largest scores of each further pass.

        Args:
            found: a number for each of this rank's heads, [H], changed in place.
        """
        self._found_H = found

    def add(self, query: Tensor, key: Tensor, mask: Mask, limits: dict[str, Any]) -> None:
        """Take the scores of a pass into account, if it is one that trains.

        Args:
            query: [B, S, H, K], as attention gets it.
            key: [B, L, G, K].
            mask: see `Kernels.attention_mask`.
            limits: the keyword arguments of attention.
        """
        if self._found_H is None or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            # Values are not read; where they travel, one number of each does.
            query, key = query.detach(), key.detach()
            largest = self._compute(query, key, key[..., :1], mask, **limits)
            self._found_H.copy_(torch.maximum(self._found_H, largest.amax((0, 1, 3))))
