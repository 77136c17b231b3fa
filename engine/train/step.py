"""One optimizer step: forward, backward, clip, update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.grouped_gemm_fp8.op import weights_unchanged
from ..data.batch import Batch
from ..observe.monitors.monitors import Monitors
from ..observe.numbers import Number
from ..observe.phases import Phase, no_phase
from ..parallel.axis import ParallelModel
from ..parallel.mesh import Degrees
from ..precision.hardware import LossScale
from ..tasks.task import Task
from .balance import Balance
from .update import Update, set_momentum


@dataclass(frozen=True)
class Gradients:
    """The results of a step's forward and backward passes over all ranks, on the device.

    Attributes:
        loss: the task's loss without regularisers, a mean over the task's own count.
        total_loss: the minimised loss with regularisers.
        norm: global gradient norm before clipping.
        sums: the sums of the losses over the global batch; see `LossRecord.sums`.
        counts: the counts of the global batch; see `Task.counts`.
    """

    loss: Tensor
    total_loss: Tensor
    norm: Tensor
    sums: Tensor
    counts: Tensor

    @property
    def count(self) -> Tensor:
        """How many units of the task the loss is a mean over."""
        return self.counts[0]


@dataclass
class TrainStep:
    """Computes the exact mean gradient over a global batch, and applies it.

    Micro batches and ranks may hold unequal counts of what the loss is a mean over: each loss is a
    sum, and the sum is divided by the count over all ranks.

    Attributes:
        parallel_model: the model, wrapped for distributed training.
        optimizer: changes the weights; each of its groups has `peak_lr`.
        task: what is learned.
        weight_update: clips gradients and steps the optimizer, after or within the backward pass.
        scale: the loss scale of fp16; 1 for other dtypes.
        device: the device of this rank.
        degrees: the ranks along each axis.
        balance: the loads of experts.
        phase: returns the context around a phase of the step.
        monitors: measure the steps at which they are due.
    """

    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    task: Task[Any]
    weight_update: Update
    scale: LossScale
    device: torch.device
    degrees: Degrees
    balance: Balance
    phase: Phase = no_phase
    monitors: Monitors = field(default_factory=Monitors)

    @property
    def loss_factor(self) -> float:
        """What multiplies every loss, so that gradients are sums times the loss scale."""
        return self.scale.value * self.parallel_model.gradient_divisor

    def set_momentum(self, change: Callable[[float], float] | None) -> None:
        """Set the momentum, or the first beta, of each parameter group for the next update.

        Args:
            change: maps the group's own value to the value to set; None leaves all as they are.
        """
        if change:
            set_momentum(self.weight_update.groups, change)

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
            before_update: called before the backward pass that does.
        """
        self.weight_update.start(lr_factor)
        batches = [batch.to(self.device) for batch in batches]
        batches = self.task.prepare(batches, self.parallel_model)
        counts = torch.stack([self.task.counts(batch) for batch in batches]).sum(0)
        # Tensor and pipeline ranks hold the same samples.
        self._sum_over_ranks(counts, self.degrees.world // self.degrees.dp_cp)
        # Each loss is a sum, and micro batches and ranks hold unequal counts of what it is a mean
        # over: it is divided by the global count.
        factor = self.task.factors(counts, self.loss_factor)
        self.balance.start(self.loss_factor, batches, self._sum_over_ranks)
        # Where the backward pass updates weights, it does so after the last use of each.
        with weights_unchanged():
            if pipeline := self.parallel_model.pipeline:
                with self.phase("pipeline"):
                    sums = pipeline.forward_backward(batches, self.task, factor)
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
        self.monitors.after_backward()
        total = self.task.total_loss(sums, counts)
        if self.balance.exists:
            total = total + self.balance.loss()
        return Gradients(self.task.mean_loss(sums, counts), total, norm, sums, counts)

    def _forward_backward(
        self, batches: Sequence[Batch], factor: Tensor, before_update: Callable[[], None]
    ) -> Tensor:
        sums = torch.zeros(self.task.num_sums, device=self.device)
        for number, batch in enumerate(batches, 1):
            # Gradients add up locally, and are reduced once, with the last micro batch.
            last = number == len(batches)
            self.parallel_model.set_gradient_sync(last)
            self.weight_update.start_backward(last)
            with self.phase("forward"):
                record = self.task.record(batch)
                loss = self.task.forward(self.parallel_model.forward, batch, record)
                parts = record.sums(loss)
            if self.weight_update.in_backward and last:
                before_update()
            with self.phase("backward"):
                torch.autograd.backward((loss * factor).sum())
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

    def update(self, lr_factor: float, is_bad: Tensor | None = None) -> None:
        """Let the optimizer change the weights, and the routers of experts their biases.

        Args:
            lr_factor: multiplies the peak learning rate of each group.
            is_bad: 1 on the device if nothing may change in this step, else 0; None: the host knows
                that the step is good.
        """
        with self.phase("optimizer"):
            self.monitors.before_update(self.weight_update.clip_factor)
            self.weight_update.apply(lr_factor, is_bad)
            self.balance.update(is_bad)
            self.monitors.after_update()

    def metrics(self, gradients: Gradients, lr: float) -> dict[str, Number]:
        """Return the metrics of a step, on the device: losses, norm, rate, loads of experts."""
        return {
            "loss": gradients.loss,
            "total_loss": gradients.total_loss,
            "grad_norm": gradients.norm,
            "lr": lr,
            **self.task.metrics(gradients.sums, gradients.counts),
            **(self.balance.metrics() if self.balance.exists else {}),
            **self.monitors.metrics(),
        }

    def clear(self) -> None:
        """Drop the gradients, or zero them where the wrapper owns their memory."""
        # DDP's gradients are views of its buckets: setting them to None would cost a copy.
        self.optimizer.zero_grad(set_to_none=not self.parallel_model.owns_gradient_buffers)
