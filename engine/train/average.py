"""An exponential moving average of the weights, kept beside them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.local import local

if TYPE_CHECKING:
    from .tables import EMA


class WeightAverage:
    """The average `a <- decay * a + (1 - decay) * w` of every trained weight, in fp32.

    It begins as a copy of the weights at its first update. Each rank keeps the part that it keeps
    of the weights, so nothing is communicated.

    Args:
        model: with its parameters in memory, laid out as they will stay.
        table: the recipe's `[ema]`.
    """

    def __init__(self, model: nn.Module, table: EMA) -> None:
        self._model = model
        self._table = table
        self._weights = {n: w for n, w in model.named_parameters() if w.requires_grad}
        self._averages = {
            name: torch.empty_like(weight, dtype=torch.float32)
            for name, weight in self._weights.items()
        }
        self.begun = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` steps, if it is due. Nothing waits for the device."""
        if step % self._table.interval:
            return
        averages = [local(tensor) for tensor in self._averages.values()]
        weights = [local(tensor) for tensor in self._weights.values()]
        if self.begun:
            torch._foreach_lerp_(averages, weights, 1 - self._table.decay)
        else:
            torch._foreach_copy_(averages, weights)
            self.begun = True

    def state(self) -> dict[str, Tensor]:
        """Return the average by `ema.NAME`; nothing before the first update."""
        return {f"ema.{name}": tensor for name, tensor in self._averages.items() if self.begun}

    def prepare(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return what is to be read from a checkpoint that holds the names `saved`.

        From one without an average it begins anew at its next update.
        """
        self.begun = any(name.startswith("ema.") for name in saved)
        return self.state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the average for a while; its own weights come back bit for bit.

        Weights and averages change places, with memory for one tensor more.
        """
        if not self.begun:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self._model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()  # FSDP may still hold weights that it has gathered
        for weight, average in zip(self._weights.values(), self._averages.values(), strict=True):
            ours, theirs = local(weight), local(average)
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)
