"""A model that is not trained, and whose outputs a task learns from: a reference or a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ..lora.apply import without_adapters
from ..parallel.axis import ParallelModel


@dataclass(frozen=True)
class FrozenModel:
    """A model whose outputs are taken without gradients.

    Attributes:
        parallel_model: the model, split by the plan of the model that is trained.
        config: the config of the model.
        context: entered with the model around each forward pass.
    """

    parallel_model: ParallelModel
    config: ModelConfig
    context: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext

    @property
    def model(self) -> Model:
        """The unwrapped module."""
        return self.parallel_model.model

    def free_gathered_weights(self) -> None:
        """Free the weights that FSDP keeps gathered for a backward pass, which never comes."""
        for module in self.model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Let a model that is trained compute as in a validation."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def base_alone(model: nn.Module) -> Iterator[None]:
    """Let a model that is trained compute without adapters, as in a validation."""
    with evaluation_mode(model), without_adapters(model):
        yield
