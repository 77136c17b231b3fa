"""Averages of the weights, which evaluations measure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...kernels.torch_private import foreach_copy_, foreach_lerp_
from ..core.local import local

if TYPE_CHECKING:
    from .tables import EMA


RESUMED = ("trained.", "average.", "lookahead.")
"""sections of a checkpoint with weights that only training needs"""


def reshard(model: nn.Module) -> None:
    """Free gathered weights: FSDP2 may hold some, and would compute with them (ZeRO-2)."""
    for module in model.modules():
        if free := getattr(module, "reshard", None):
            free()


class _Average:
    """Base of what gives a model other weights in evaluations."""

    is_separate = True
    """whether it is saved and exported beside the weights of the model"""
    has_begun = False
    """whether there was an update of a separate average"""


class WeightAverage(_Average):
    """The average `a <- decay * a + (1 - decay) * w` of every trained weight, in fp32.

    The first update copies the weights. Each rank averages its shards of the weights, so nothing
    is communicated.

    Args:
        model: the model with its parameters in memory, sharded as in training.
        table: the recipe's `[ema]`.
        total_steps: optimizer steps of the run.
    """

    def __init__(self, model: nn.Module, table: EMA, total_steps: int = 0) -> None:
        self._model = model
        self._table = table
        self._first_step = total_steps - table.last_steps if table.last_steps else 0
        self._weights = {n: w for n, w in model.named_parameters() if w.requires_grad}
        self._averages = {
            # With a decay near 1, an update is too small for bf16's eight bits.
            name: torch.empty_like(weight, dtype=torch.float32)
            for name, weight in self._weights.items()
        }
        self._is_wider = any(weight.dtype is torch.bfloat16 for weight in self._weights.values())
        self.has_begun = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after `step` steps if that is due; nothing waits for the device."""
        if step % self._table.interval or step < self._first_step:
            return
        averages = [local(tensor) for tensor in self._averages.values()]
        weights = [local(tensor) for tensor in self._weights.values()]
        if self.has_begun and self._is_wider:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight.to(average.dtype), 1 - self._table.decay)
        elif self.has_begun:
            foreach_lerp_(averages, weights, 1 - self._table.decay)
        else:
            foreach_copy_(averages, weights)
            self.has_begun = True

    def state(self) -> dict[str, Tensor]:
        """Return what is evaluated as `ema.NAME`; nothing before the first update.

        With `blend` below 1 the average itself is beside it as `average.NAME`.
        """
        if not self.has_begun:
            return {}
        averages = {f"ema.{name}": tensor for name, tensor in self._averages.items()}
        if self._table.blend == 1:
            return averages
        blended = {}
        for name, weight in self._weights.items():
            blended[f"ema.{name}"] = torch.empty_like(self._averages[name])
            local(blended[f"ema.{name}"]).copy_(self._blend(name, weight))
        return blended | {f"average.{name}": tensor for name, tensor in self._averages.items()}

    def prepare(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint fills.

        Args:
            saved: names of the tensors in the checkpoint. Without an average among them the next
                update begins a new one.
        """
        self.has_begun = any(name.startswith("ema.") for name in saved)
        if not self.has_begun:
            return {}
        found = {f"ema.{name}": tensor for name, tensor in self._averages.items()}
        if any(name.startswith("average.") for name in saved):
            averages = {f"average.{name}": tensor for name, tensor in self._averages.items()}
            found = averages | {name: torch.empty_like(tensor) for name, tensor in found.items()}
        return found

    @torch.no_grad()
    def _blend(self, name: str, weight: Tensor) -> Tensor:
        """Return this rank's part of what is evaluated, in fp32."""
        average = local(self._averages[name])
        return torch.lerp(local(weight).to(average.dtype), average, self._table.blend)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Give the model the average within a context; its own weights return bit for bit.

        Weights and averages are exchanged one by one, with the memory of one tensor more. Weights
        in bf16 cannot hold an average, and are copied instead, as is what a blend replaces.
        """
        if not self.has_begun:
            yield
            return
        is_copied = self._is_wider or self._table.blend < 1
        kept = [local(weight).clone() for weight in self._weights.values()] * is_copied
        if kept:
            self._fill(self._blend(name, weight) for name, weight in self._weights.items())
        else:
            self._swap()
        try:
            yield
        finally:
            if kept:
                self._fill(kept)
            else:
                self._swap()

    @torch.no_grad()
    def _fill(self, values: Iterable[Tensor]) -> None:
        reshard(self._model)
        for weight, value in zip(self._weights.values(), values, strict=True):
            local(weight).copy_(value)

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._model)
        for weight, average in zip(self._weights.values(), self._averages.values(), strict=True):
            shard, average_shard = local(weight), local(average)
            # Bit for bit: no arithmetic, and one tensor at a time to save memory.
            copy = shard.clone()
            shard.copy_(average_shard)
            average_shard.copy_(copy)


class OptimizerAverage(_Average):
    """The weights that an optimizer averages while it trains others (schedule-free).

    Checkpoints hold the average as the weights of the model, so that every reader gets it, and the
    trained weights beside it, from which a run resumes.

    Args:
        model: the model with its parameters in memory, sharded as in training.
        average_of: returns this rank's part of the average of a parameter, or None before its first
            update.
    """

    is_separate = False

    def __init__(self, model: nn.Module, average_of: Callable[[Tensor], Tensor | None]) -> None:
        self._model = model
        self._average_of = average_of
        self._weights = {n: w for n, w in model.named_parameters() if w.requires_grad}

    def update(self, step: int) -> None:
        """Do nothing: the optimizer updates the average."""

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Return the average as `model.NAME`, and the trained weights as `trained.NAME`."""
        found = {}
        for name, weight in self._weights.items():
            if (average := self._average_of(weight)) is not None:
                copy = torch.empty_like(weight, requires_grad=False)
                local(copy).copy_(average)
                found[f"model.{name}"], found[f"trained.{name}"] = copy, weight.detach()
        return found

    def prepare(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint fills: the trained weights are the model's own.

        Args:
            saved: names of the tensors in the checkpoint.
        """
        found = {}
        for name, weight in self._weights.items():
            if f"trained.{name}" in saved:
                found[f"model.{name}"] = torch.empty_like(weight, requires_grad=False)
                found[f"trained.{name}"] = weight.detach()
        return found

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Give the model the average within a context; its own weights return bit for bit."""
        reshard(self._model)
        kept = {}
        with torch.no_grad():
            for weight in self._weights.values():
                if (average := self._average_of(weight)) is not None:
                    part = local(weight)
                    kept[weight] = part.clone()
                    part.copy_(average)
        try:
            yield
        finally:
            reshard(self._model)
            for weight, part in kept.items():
                local(weight).copy_(part)


Average = WeightAverage | OptimizerAverage
"""what gives a model other weights in evaluations"""
