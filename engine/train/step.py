"""One optimizer step: forward, backward, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...model_zoo.language_model import LossFunction, LossRecord, sum_by_source
from ..data.batch import IGNORED, Batch
from ..observe.observer import Mean, Number
from ..observe.phases import Phase, no_phase
from ..parallel.axis import ParallelModel
from ..parallel.mesh import Degrees
from ..precision.hardware import LossScale
from .balance import Balance
from .update import Update


def count_tokens(batch: Batch, num_sources: int = 0) -> Tensor:
    """Count the labels that are trained on.

    Returns:
        int64 [1 + num_sources]: the count of all labels, then of each source.
    """
    rows = (batch.labels != IGNORED).sum(1)
    tokens = rows.sum().view(1)
    if batch.sources is None or not num_sources:
        return tokens
    return torch.cat([tokens, sum_by_source(rows, batch.sources, num_sources)])


def forward_loss(
    forward: Callable[..., Tensor], batch: Batch, loss: LossFunction, num_sources: int = 0
) -> tuple[Tensor, Tensor]:
    """Run the forward pass of a batch.

    Args:
        forward: the model, or its wrapper.
        batch: a micro batch on the model's device.
        loss: the loss function of the recipe.
        num_sources: how many sources have a loss of their own in the metrics.

    Returns:
        the summed loss that is minimised, and the sums that `LossRecord.sums` makes of it.
    """
    record = LossRecord(loss)
    total = forward(
        batch.tokens,
        # The head computes the loss, in chunks: all logits at once would not fit in memory.
        labels=batch.labels,
        loss=record,
        positions=batch.positions,
        document_ids=batch.document_ids,
        **({} if batch.padding_mask is None else {"padding_mask": batch.padding_mask}),
    )
    return total, record.sums(total, batch.sources, num_sources)


class Gradients(NamedTuple):
    """The results of a step's forward and backward passes, summed over all ranks, on the device.

    Args:
        loss: the task loss, summed over the valid tokens of the global batch.
        tokens: number of valid tokens in the global batch.
        norm: global gradient norm before clipping.
        total_loss: the minimised loss with regularisers, a mean over the valid tokens.
        source_losses: `loss` of each source, where sources are reported apart.
        source_tokens: `tokens` of each source.
    """

    loss: Tensor
    tokens: Tensor
    norm: Tensor
    total_loss: Tensor
    source_losses: Sequence[Tensor] = ()
    source_tokens: Sequence[Tensor] = ()

    @property
    def mean_loss(self) -> Tensor:
        """The task loss, a mean over the valid tokens of the global batch."""
        return self.loss / self.tokens.clamp(min=1)


@dataclass
class TrainStep:
    """Computes the exact mean gradient over the valid tokens of a global batch, and applies it.

    Micro batches and ranks may hold unequal numbers of valid tokens: each loss is a sum, and the
    sum is divided by the count over all ranks.

    Attributes:
        parallel_model: the model, wrapped for distributed training.
        optimizer: changes the weights; each of its groups has `peak_lr`.
        loss: the loss function of the recipe.
        weight_update: clips gradients and steps the optimizer, after or within the backward pass.
        scale: the loss scale of fp16; 1 for other dtypes.
        device: the device of this rank.
        degrees: the ranks along each axis.
        balance: the loads of experts.
        sources: what metrics call the sources whose losses are reported apart.
        phase: returns the context around a phase of the step.
    """

    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    weight_update: Update
    scale: LossScale
    device: torch.device
    degrees: Degrees
    balance: Balance
    sources: Sequence[str] = ()
    phase: Phase = no_phase

    @property
    def loss_factor(self) -> float:
        """What multiplies every loss, so that gradients are sums times the loss scale."""
        return self.scale.value * self.parallel_model.gradient_divisor

    def accumulate(
        self,
        batches: Sequence[Batch],
        lr_factor: float | None = None,
        before_update: Callable[[], None] = lambda: None,
    ) -> Gradients:
        """Run forward and backward over the micro batches and clip the gradient.

        Args:
            batches: this rank's micro batches of the step.
            lr_factor: multiplies peak learning rates; needed where the backward pass updates
                weights (`memory.optimizer_in_backward`), unused elsewhere.
            before_update: called before such a backward pass.
        """
        self.weight_update.start(lr_factor)
        batches = [batch.to(self.device) for batch in batches]
        num_sources = len(self.sources)
        counts = torch.stack([count_tokens(batch, num_sources) for batch in batches]).sum(0)
        # Tensor and pipeline ranks hold the same labels.
        self._sum_over_ranks(counts, self.degrees.world // self.degrees.dp_cp)
        tokens, *source_tokens = counts.unbind()
        # Each loss is a sum over valid tokens, of which micro batches and ranks hold unequal
        # numbers: it is divided by the global count.
        factor = self.loss_factor / tokens.clamp(min=1)
        masks = [batch.padding_mask for batch in batches]
        self.balance.start(self.loss_factor, masks, self._sum_over_ranks)
        if pipeline := self.parallel_model.pipeline:
            with self.phase("pipeline"):
                sums = pipeline.forward_backward(batches, self.loss, factor, num_sources)
        else:
            sums = self._forward_backward(batches, factor, before_update)
        # Only the last pipeline stage has a loss, so its tensor ranks alone hold the same one.
        self._sum_over_ranks(sums, self.degrees.loss_copies)
        if self.balance.exists:
            self.balance.collect(self._sum_over_ranks)
        with self.phase("clip"):
            # In the same order on all ranks: each of these is a collective.
            for reduce_gradients in self.parallel_model.post_backward_reductions:
                reduce_gradients()
            norm = self.weight_update.finish()
        total = sums[0] / tokens.clamp(min=1)
        if self.balance.exists:
            total = total + self.balance.loss()
        return Gradients(sums[1], tokens, norm, total, sums[2:].unbind(), source_tokens)

    def _forward_backward(
        self, batches: Sequence[Batch], factor: Tensor, before_update: Callable[[], None]
    ) -> Tensor:
        num_sources = len(self.sources)
        sums = torch.zeros(2 + num_sources, device=self.device)
        for number, batch in enumerate(batches, 1):
            # Gradients add up locally, and are reduced once, with the last micro batch.
            self.parallel_model.set_gradient_sync(number == len(batches))
            with self.phase("forward"):
                forward = self.parallel_model.forward
                loss, parts = forward_loss(forward, batch, self.loss, num_sources)
            if self.weight_update.in_backward:
                before_update()
            with self.phase("backward"):
                torch.autograd.backward(loss * factor)
            sums += parts  # on the device: reading a loss here would wait for each micro batch
        return sums

    def _sum_over_ranks(self, tensor: Tensor, num_equal: int = 1) -> None:
        """Sum a tensor over all ranks in place.

        Args:
            tensor: this rank's numbers.
            num_equal: number of ranks that hold the same numbers, which count once.
        """
        if self.degrees.world > 1:
            dist.all_reduce(tensor)
            tensor.div_(num_equal, rounding_mode=None if tensor.is_floating_point() else "floor")

    def update(self, lr_factor: float) -> None:
        """Let the optimizer change the weights, and the routers of experts their biases.

        Args:
            lr_factor: multiplies the peak learning rate of each group.
        """
        with self.phase("optimizer"):
            self.weight_update.apply(lr_factor)
            self.balance.update()

    def metrics(self, gradients: Gradients, lr: float) -> dict[str, Number]:
        """Return the metrics of a step, on the device: losses, norm, rate, loads of experts."""
        sums = zip(gradients.source_losses, gradients.source_tokens, strict=True)
        return {
            "loss": gradients.mean_loss,
            "total_loss": gradients.total_loss,
            "grad_norm": gradients.norm,
            "lr": lr,
            **{f"loss/{name}": Mean(*each) for name, each in zip(self.sources, sums, strict=True)},
            **(self.balance.metrics() if self.balance.exists else {}),
        }

    def clear(self) -> None:
        """Drop the gradients, or zero them where the wrapper owns their memory."""
        # DDP's gradients are views of its buckets: setting them to None would cost a copy.
        self.optimizer.zero_grad(set_to_none=not self.parallel_model.owns_gradient_buffers)
