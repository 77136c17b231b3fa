"""The contract between a task and the rest of the engine.

A task says what a batch holds, what the model computes of it, which sums are minimised and which
numbers are told. The step, the loop, the pipeline, validation and the estimates know nothing else
of what is learned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from ..core.errors import RecipeError
from ..data.batch import Batch
from ..data.tables import Data
from ..observe.numbers import Number
from ..parallel.axis import ParallelModel
from .metrics.tables import Outputs

if TYPE_CHECKING:
    from .frozen import FrozenModel


class LossRecord(ABC):
    """The criterion for one forward pass of one batch, which keeps the numbers that are told."""

    @abstractmethod
    def __call__(self, *outputs: Any) -> Tensor:
        """Return the sums that are minimised, a scalar or [K], from the outputs of the model.

        The head of a model calls it, where the weights of the head are gathered. A language head
        gives hidden states [T, D], head weight [V, D] and labels [T], and the keyword `softcap`
        if logits are capped (see `kernels.softcap`); other heads give outputs.
        """

    @abstractmethod
    def sums(self, minimized: Tensor) -> Tensor:
        """Return the sums of the batch, [num_sums] on the device, without gradient.

        Args:
            minimized: what the forward pass returned.
        """

    def predictions(self) -> tuple[Any, Any] | None:
        """Return what metrics compare: outputs of the model and targets, one row a sample.

        They are tensors, or, of the kind "answer" of `Outputs`, texts.

        Samples that only fill up a batch are left out. None: the task has no such pair.
        """
        return None


B = TypeVar("B", bound=Batch)


@dataclass(frozen=True, kw_only=True)
class Task(ABC, Generic[B]):
    """What is learned, on this rank.

    Sums of a loss and the counts that they are divided by travel apart, so that means are exact
    however samples are divided into micro batches and over ranks.

    Attributes:
        loss: the criterion that the recipe's `[loss]` builds.
        data: the recipe's `[data]`.
        sources: what metrics call the sources whose losses are reported apart.
        frozen: a model that the task learns from and that is not trained; None: there is none.
        keeps_predictions: whether `LossRecord.predictions` is asked for.
    """

    loss: Any
    data: Data
    sources: Sequence[str] = ()
    frozen: FrozenModel | None = None
    keeps_predictions: bool = False

    batch_class: ClassVar[type[Batch]]
    """the class of the task's batches"""
    unit: ClassVar[str] = "samples"
    """what `count` counts: "tokens" or "samples" """

    @property
    @abstractmethod
    def num_sums(self) -> int:
        """The length of the tensors that `LossRecord.sums` returns."""

    @abstractmethod
    def counts(self, batch: B) -> Tensor:
        """Return the counts of a batch; the first one is that of the task's unit."""

    @abstractmethod
    def factors(self, counts: Tensor, scale: float) -> Tensor:
        """Return what multiplies the minimised sums, so that a weighted mean is minimised.

        Args:
            counts: the sum of `counts` over the batches of a step on all ranks.
            scale: multiplies every factor; see `TrainStep.loss_factor`.

        Returns:
            a scalar or [K], as `LossRecord` returns sums.
        """

    @abstractmethod
    def input(self, batch: B) -> Tensor:
        """Return the first argument of the model: what the first stage of a pipeline takes."""

    @abstractmethod
    def arguments(self, batch: B) -> dict[str, Any]:
        """Return the further arguments of the model, which all stages of a pipeline get."""

    def loss_arguments(self, batch: B, record: LossRecord) -> dict[str, Any]:
        """Return the arguments with which the model computes the loss by name."""
        return {"loss": record}

    @abstractmethod
    def record(self, batch: B) -> LossRecord:
        """Return the criterion for one forward pass of a batch."""

    def forward(self, forward: Callable[..., Tensor], batch: B, record: LossRecord) -> Tensor:
        """Run the forward pass of a batch and return the sums that are minimised.

        Args:
            forward: the model, or its wrapper.
            batch: a micro batch on the model's device.
            record: the criterion for this batch.
        """
        # The head computes the loss: it may make its outputs in pieces, which all at once would
        # not fit in memory.
        arguments = self.arguments(batch)
        return forward(self.input(batch), **arguments, **self.loss_arguments(batch, record))

    @abstractmethod
    def mean_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the task's loss without regularisers, a mean over the task's own count."""

    @abstractmethod
    def total_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the loss that is minimised, regularisers included."""

    def metrics(self, sums: Tensor, counts: Tensor) -> Mapping[str, Number]:
        """Return further metrics of a step, on the device."""
        return {}

    def evaluation_counts(self, batch: B) -> Tensor:
        """Return the counts of a batch of a validation; they may be more than those of a step."""
        return self.counts(batch)

    @abstractmethod
    def evaluation(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return the numbers of a validation, `loss` first.

        Args:
            sums: the sums over all batches and ranks.
            counts: the sums of `evaluation_counts`.
        """

    @abstractmethod
    def example(self, rows: int) -> B:
        """Return a batch of zeros with the shapes of a step's batch of so many samples."""

    @property
    def passes(self) -> float:
        """The FLOPs of a step over those of the model's own forward and backward pass."""
        return 1.0

    def flops_per_unit(self, flops_per_token: float) -> float:
        """Return the FLOPs of a training step for each unit that is counted.

        Args:
            flops_per_token: the FLOPs of a training step for each position of a sequence.
        """
        return flops_per_token

    def prepare(self, batches: Sequence[B], model: ParallelModel) -> Sequence[B]:
        """Add to the batches of a step what is computed before it, without gradients.

        Such are the outputs of a frozen model, and statistics of the whole batch over all ranks.

        Args:
            batches: this rank's micro batches, on the device.
            model: the model that is trained; see `run_forward`.
        """
        return batches

    def prepare_validation(self, batches: Iterable[B], model: ParallelModel) -> Self:
        """Return the task with what is computed of a whole validation before its first batch.

        Args:
            batches: all batches of this rank, on the device; a task that needs none of them reads
                none.
            model: as in `prepare`.
        """
        return self

    def ask_frozen(self, batch: B) -> Mapping[str, Tensor]:
        """Return what the frozen model says of a micro batch, by field of the batch.

        A field has a value a row, or [B, S, ...] values of each position. All ranks that share the
        model call it; those without the last pipeline stage get nothing.
        """
        raise NotImplementedError

    def output_record(self, batch: B) -> LossRecord:
        """Return what keeps the outputs of one forward pass, for `predict`.

        Raises:
            RecipeError: the task predicts nothing of single samples.
        """
        raise RecipeError(f"{type(self).__name__} predicts nothing of single samples")

    def predict(
        self, batch: B, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return a prediction for each sample of a batch, of values that JSON has.

        Args:
            batch: the samples, on the device.
            record: what `output_record` returned, after the forward pass.
            meaning: what the outputs are, as metrics know them; None: nobody says.
        """
        raise NotImplementedError

    def wrap_loss(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self:
        """Return the task with a wrapper around the function that computes the loss."""
        return replace(self, loss=wrap(self.loss))

    def with_sources(self, sources: Sequence[str]) -> Self:
        """Return the task for data whose sources have these labels."""
        return replace(self, sources=tuple(sources))


@torch.no_grad()
def run_forward(model: ParallelModel, task: Task[B], batch: B) -> LossRecord | None:
    """Run a forward pass without gradients; all ranks that share the model call it.

    Returns:
        the criterion with what it has kept, or None on ranks without the last pipeline stage.
    """
    if model.pipeline:
        model.pipeline.evaluate(batch, task)
        record: LossRecord | None = model.pipeline.take_record()
        return record
    record = task.record(batch)
    # The unwrapped module, as in validation: DDP has nothing to do without gradients, and the hooks
    # of FSDP are the module's own.
    task.forward(model.model, batch, record)
    return record
