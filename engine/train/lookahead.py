"""EMA-Nesterov: gradients are computed ahead of the weights (Yau et al. 2026, arXiv:2605.25395)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.local import local
from .average import reshard

if TYPE_CHECKING:
    from .tables import Nesterov


class Lookahead:
    """Moves the weights along the running mean of their changes before each step.

    With x the weights between steps and m the mean, in fp32, a step takes the optimizer from
    x + beta m to the next x, and m <- decay m + (1 - decay) (next x - x). beta is `scale` times the
    factor of the learning rate between the steps `start` and `end`, and 0 outside. Each rank moves
    its shards, so nothing is communicated. The old weights are kept during a step.

    Args:
        model: the model with its parameters in memory, sharded as in training.
        table: the recipe's `[ema.nesterov]`.
        total_steps: optimizer steps of the run.
    """

    def __init__(self, model: nn.Module, table: Nesterov, total_steps: int) -> None:
        self._model = model
        self._table = table
        self._steps = range(round(table.start * total_steps), round(table.end * total_steps))
        self._weights = {n: w for n, w in model.named_parameters() if w.requires_grad}
        self._means = {
            name: torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            for name, weight in self._weights.items()
        }
        self._old: list[Tensor] = []

    @torch.no_grad()
    def start(self, step: int, lr_factor: float) -> None:
        """Move the weights ahead.

        Args:
            step: finished optimizer steps.
            lr_factor: multiplies the peak learning rate in the next step.
        """
        self._old = [local(weight).clone() for weight in self._weights.values()]
        if step in self._steps:
            reshard(self._model)
            for weight, mean in zip(self._weights.values(), self._means.values(), strict=True):
                local(weight).add_(local(mean), alpha=self._table.scale * lr_factor)

    @torch.no_grad()
    def finish(self, *, is_updated: bool) -> None:
        """Update the mean change, or return to the old weights if the optimizer did not step."""
        for old, weight, mean in zip(
            self._old, self._weights.values(), self._means.values(), strict=True
        ):
            if is_updated:
                local(mean).lerp_((local(weight) - old).to(mean.dtype), 1 - self._table.decay)
            else:
                local(weight).copy_(old)
        self._old = []

    def state(self) -> dict[str, Tensor]:
        """Return the mean changes as `lookahead.NAME`."""
        return {f"lookahead.{name}": mean for name, mean in self._means.items()}

    def prepare(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint fills.

        Args:
            saved: names of the tensors in the checkpoint. Without mean changes among them they
                begin at 0.
        """
        return self.state() if any(name.startswith("lookahead.") for name in saved) else {}
