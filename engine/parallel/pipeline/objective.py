"""What a pipeline needs of a task, which lies in a package above."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from torch import Tensor

from ...data.batch import Batch


class Objective(Protocol):
    """What a pipeline needs of a task; see `Task` for each of these."""

    batch_class: ClassVar[type[Batch]]

    @property
    def num_sums(self) -> int:
        """The length of the tensor of sums of a forward pass."""

    def input(self, batch: Any) -> Tensor:
        """Return what the first stage takes."""

    def arguments(self, batch: Any) -> dict[str, Any]:
        """Return the further arguments of every stage."""

    def loss_arguments(self, batch: Any, record: Any) -> dict[str, Any]:
        """Return the arguments with which the last stage computes the loss."""

    def record(self, batch: Any) -> Any:
        """Return the criterion for one forward pass, which the last stage calls."""

    def example(self, rows: int) -> Any:
        """Return a batch of zeros of so many samples."""
