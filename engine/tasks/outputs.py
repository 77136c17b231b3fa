"""Forward passes without gradients whose outputs are kept, of frozen models and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..data.batch import Batch
from .frozen import FrozenModel
from .task import LossRecord, Task, run_forward

R = TypeVar("R", bound="OutputRecord")


class OutputRecord(LossRecord):
    """Keeps outputs of a model instead of losses."""

    def sums(self, minimized: Tensor) -> Tensor:
        """Return one zero: there is nothing to sum."""
        return torch.zeros(1, device=minimized.device)


class KeptOutputs(OutputRecord):
    """Keeps the outputs of a forward pass as they are.

    Attributes:
        outputs: what the head or the module gave, without gradient: one tensor or several.
    """

    outputs: Any = None

    def __call__(self, *outputs: Any) -> Tensor:
        """Keep the outputs and return one zero."""
        self.outputs = outputs if len(outputs) > 1 else outputs[0]
        return torch.zeros(1)


class OutputPass:
    """A task whose forward pass keeps outputs instead of losses; see `Task`.

    Args:
        task: knows how a model is called with a batch.
        make_record: returns the record of a batch.
    """

    num_sums = 1

    def __init__(self, task: Task[Any], make_record: Callable[[Any], OutputRecord]) -> None:
        self._task = task
        self.record = make_record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def forward(self, forward: Callable[..., Tensor], batch: Any, record: LossRecord) -> Tensor:
        """Run the forward pass of a batch as every task does it."""
        return Task.forward(self, forward, batch, record)  # type: ignore[arg-type]


def run_frozen(
    frozen: FrozenModel, task: Task[Any], batch: Batch, make_record: Callable[[Any], R]
) -> R | None:
    """Run a forward pass without gradients; all ranks that share the model call it.

    Args:
        frozen: the model.
        task: knows how the model is called.
        batch: this rank's samples.
        make_record: returns the record of a batch.

    Returns:
        the record with what it has kept, or None on ranks without the last pipeline stage.
    """
    model, outputs = frozen.parallel_model, OutputPass(task, make_record)
    with frozen.context(model.model):
        record: Any = run_forward(model, outputs, batch)  # type: ignore[arg-type]
    if not model.model.training:
        frozen.free_gathered_weights()
    return record  # type: ignore[no-any-return]
