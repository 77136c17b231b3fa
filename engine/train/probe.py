"""Measures the activations and gradients of each layer in one step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...kernels.summation import widen
from ...kernels.torch_private import current_autograd_node
from ...model_zoo.layout import Layout
from ..core.local import local, num_parts

if TYPE_CHECKING:
    from .step import TrainStep


@dataclass
class Sums:
    """Statistics of some numbers that can be added over micro batches and ranks.

    Attributes:
        squares: sum of the squares of the finite numbers.
        count: how many numbers there are.
        largest: largest absolute value of a finite number.
        non_finite: how many numbers are NaN or infinite.
    """

    squares: float = 0.0
    count: float = 0.0
    largest: float = 0.0
    non_finite: float = 0.0

    @property
    def rms(self) -> float:
        """Root mean square; 0 without numbers."""
        return float((self.squares / self.count) ** 0.5) if self.count else 0.0

    @property
    def norm(self) -> float:
        """The L2 norm."""
        return float(self.squares**0.5)

    def add(self, other: Sums) -> None:
        """Add the statistics of other numbers, in place."""
        self.squares += other.squares
        self.count += other.count
        self.largest = max(self.largest, other.largest)
        self.non_finite += other.non_finite


@dataclass
class LayerSums:
    """Statistics of a layer's output, of the gradient of that, and of the weights' gradients."""

    activations: Sums = field(default_factory=Sums)
    gradients: Sums = field(default_factory=Sums)
    weights: Sums = field(default_factory=Sums)

    def add(self, other: LayerSums) -> None:
        """Add the statistics of another rank, in place."""
        for name, sums in vars(self).items():
            sums.add(getattr(other, name))


def measure(tensor: Tensor, share: float = 1.0) -> Sums:
    """Return the statistics of this rank's part of a tensor.

    Args:
        tensor: a tensor on any device; this waits for it.
        share: weight of each number, below 1 where several ranks hold the same numbers.
    """
    values = widen(local(tensor))  # in fp32 the squares of small gradients underflow
    is_finite = values.isfinite()
    values = values.where(is_finite, 0.0)
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    # One copy from the device for all of them.
    numbers = torch.stack([values.square().sum(), largest, widen(is_finite.sum())])
    squares, max_value, num_finite = numbers.tolist()
    count = values.numel()
    return Sums(squares * share, count * share, max_value, (count - num_finite) * share)


def layers_of(model: nn.Module, layout: Layout) -> dict[str, nn.Module]:
    """Return the layers to measure: embedding, blocks and their parts, parts of the head."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_children():
        blocks = {name: module}
        if name == layout.blocks:
            blocks = {f"{name}.{number}": block for number, block in module.named_children()}
        for path, block in blocks.items():
            parts = {f"{path}.{part}": child for part, child in block.named_children()}
            layers |= parts
            if name == layout.blocks or not parts:
                layers[path] = block
    return layers


class Probe:
    """Measures the layers of a model in a training step.

    Args:
        step: the step that is measured.
        layout: names of the model's blocks.

    Attributes:
        layers: the statistics of this rank by the layer's name.
    """

    def __init__(self, step: TrainStep, layout: Layout) -> None:
        self._step = step
        self._modules = layers_of(step.parallel_model.model, layout)
        self.layers = {name: LayerSums() for name in self._modules}
        # Gradients are those of the loss times this factor.
        self._unscale = 1 / step.loss_factor

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Measure the passes within the context, and then the gradients of the weights."""
        hooks = [
            module.register_forward_hook(partial(self._measure_output, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self._measure_weights()

    def _measure_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # A pipeline asks for shapes with tensors on `meta`.
        if not isinstance(output, Tensor) or output.is_meta or not output.ndim:
            return
        # Recomputation calls the layer once more, within the backward pass.
        if current_autograd_node() is not None:
            return
        self.layers[name].activations.add(measure(output.detach()))
        if output.requires_grad:
            register_hook: Any = output.register_hook  # torch has no types for it
            register_hook(partial(self._measure_gradient, name))

    def _measure_gradient(self, name: str, gradient: Tensor) -> None:
        self.layers[name].gradients.add(measure(gradient * self._unscale))

    def _measure_weights(self) -> None:
        parallel_model, degrees = self._step.parallel_model, self._step.degrees
        num_holders = degrees.world // degrees.pipeline
        duplicates = set(map(id, parallel_model.duplicate_parameters))
        for name, weight in parallel_model.model.named_parameters():
            if weight.grad is not None and id(weight) not in duplicates:
                sums = measure(weight.grad, num_parts(weight.grad) / num_holders)
                self.layers[owner_of(name, self.layers)].weights.add(sums)


def owner_of(parameter: str, layers: Mapping[str, Any]) -> str:
    """Return the innermost layer that a parameter belongs to.

    Raises:
        KeyError: it belongs to none.
    """
    name = parameter
    while name not in layers:
        if not name:
            raise KeyError(parameter)
        name = name.rpartition(".")[0]
    return name


def merge(parts: Sequence[Mapping[str, LayerSums]]) -> dict[str, LayerSums]:
    """Add the statistics of all ranks, in the order of the model; stages have different layers."""
    whole: dict[str, LayerSums] = {}
    for part in parts:
        for name, sums in part.items():
            whole.setdefault(name, LayerSums()).add(sums)
    first = {name: number for number, name in enumerate(whole)}

    def position(name: str) -> tuple[int, int]:
        block = re.search(r"\.(\d+)(\.|$)", name)
        if block:
            return int(block[1]), first[name]
        return (-1 if name.startswith("embed") else 2**31), first[name]

    return {name: whole[name] for name in sorted(whole, key=position)}
