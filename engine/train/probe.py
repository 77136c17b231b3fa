"""Measures the activations and gradients of each layer in one step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core.local import local, num_parts

if TYPE_CHECKING:
    from ...model_zoo.layout import Layout
    from .step import TrainStep


@dataclass
class Sums:
    """What is known of some numbers, so that micro batches and ranks can be added.

    Attributes:
        squares: sum of the squares of the finite ones.
        count: how many there are.
        largest: absolute value of the largest finite one.
        non_finite: how many are NaN or infinite.
    """

    squares: float = 0.0
    count: float = 0.0
    largest: float = 0.0
    non_finite: float = 0.0

    @property
    def rms(self) -> float:
        """Root mean square; 0 of nothing."""
        return float((self.squares / self.count) ** 0.5) if self.count else 0.0

    @property
    def norm(self) -> float:
        """The L2 norm."""
        return float(self.squares**0.5)

    def add(self, other: Sums) -> None:
        """Add what is known of other numbers, in place."""
        self.squares += other.squares
        self.count += other.count
        self.largest = max(self.largest, other.largest)
        self.non_finite += other.non_finite


@dataclass
class LayerSums:
    """One layer's output, the gradient of the loss by it, and the gradients of its weights."""

    activations: Sums = field(default_factory=Sums)
    gradients: Sums = field(default_factory=Sums)
    weights: Sums = field(default_factory=Sums)

    def add(self, other: LayerSums) -> None:
        """Add another rank's part, in place."""
        for each in fields(self):
            getattr(self, each.name).add(getattr(other, each.name))


def measure(tensor: Tensor, share: float = 1.0) -> Sums:
    """Return what is known of a tensor's numbers.

    Args:
        tensor: on any device; this waits for it.
        share: what each number counts for, where several ranks hold the same ones.
    """
    values = local(tensor).double()
    finite = values.isfinite()
    values = values.where(finite, 0.0)
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    found = torch.stack([values.square().sum(), largest, finite.sum().double()])
    squares, largest_one, good = found.tolist()
    count = values.numel()
    return Sums(squares * share, count * share, largest_one, (count - good) * share)


def layers_of(model: nn.Module, layout: Layout) -> dict[str, nn.Module]:
    """Return the layers that are measured: embedding, blocks and their parts, parts of the head."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_children():
        if name != layout.blocks:
            parts = {f"{name}.{part}": each for part, each in module.named_children()}
            found |= parts or {name: module}
            continue
        for number, block in module.named_children():
            for part, each in block.named_children():
                found[f"{name}.{number}.{part}"] = each
            found[f"{name}.{number}"] = block
    return found


class Probe:
    """Measures the layers of a training step while `watching`.

    Args:
        step: whose model is measured.
        layout: where its blocks are.
    """

    def __init__(self, step: TrainStep, layout: Layout) -> None:
        self._step = step
        self._layers = layers_of(step.parallel_model.model, layout)
        self.found = {name: LayerSums() for name in self._layers}
        # Gradients are of the loss times these: see `TrainStep.accumulate`.
        self._unscale = 1 / step.loss_factor

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the passes inside, and the weights' gradients that they leave."""
        hooks = [
            module.register_forward_hook(partial(self._take_output, name))
            for name, module in self._layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._take_weights()

    def _take_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # A pipeline asks for shapes with tensors on `meta`; recomputation calls a layer once more.
        if not isinstance(output, Tensor) or output.is_meta or not output.ndim:
            return
        if torch._C._current_autograd_node() is not None:
            return
        self.found[name].activations.add(measure(output.detach()))
        if output.requires_grad:
            watch: Any = output.register_hook  # torch has no types for it
            watch(partial(self._take_gradient, name))

    def _take_gradient(self, name: str, gradient: Tensor) -> None:
        self.found[name].gradients.add(measure(gradient * self._unscale))

    def _take_weights(self) -> None:
        parallel_model, degrees = self._step.parallel_model, self._step.degrees
        holders = degrees.world // degrees.pipeline
        elsewhere = set(map(id, parallel_model.duplicate_parameters))
        for name, weight in parallel_model.model.named_parameters():
            if weight.grad is not None and id(weight) not in elsewhere:
                layer = owner_of(name, self.found)
                sums = measure(weight.grad, num_parts(weight.grad) / holders)
                self.found[layer].weights.add(sums)


def owner_of(parameter: str, layers: Mapping[str, Any]) -> str:
    """Return the innermost layer that a parameter belongs to.

    Raises:
        KeyError: none.
    """
    name = parameter
    while name not in layers:
        if not name:
            raise KeyError(parameter)
        name = name.rpartition(".")[0]
    return name


def merge(parts: Sequence[Mapping[str, LayerSums]]) -> dict[str, LayerSums]:
    """Add the ranks' parts, in the order of the model: each pipeline stage has its own layers."""
    whole: dict[str, LayerSums] = {}
    for part in parts:
        for name, sums in part.items():
            whole.setdefault(name, LayerSums()).add(sums)
    first = {name: number for number, name in enumerate(whole)}

    def place(name: str) -> tuple[int, int]:
        block = re.search(r"\.(\d+)(\.|$)", name)
        if block:
            return int(block[1]), first[name]
        return (-1 if name.startswith("embed") else 2**31), first[name]

    return {name: whole[name] for name in sorted(whole, key=place)}
