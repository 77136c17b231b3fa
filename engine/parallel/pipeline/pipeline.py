"""Pipeline parallelism: each rank holds some of the blocks, and micro batches pass from stage to
stage (schedules of torch.distributed.pipelining).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from ....kernels.torch_private import PipelineAction, PipelineScheduleRuntime
from ...core.errors import EnvironmentFault
from ...data.batch import Batch
from .cut import SPLIT_BACKWARD, StageSplit
from .objective import Objective
from .reducing_stage import CountingStage, ReducingStage, hold_gradients
from .schedule_file import ScheduleFile
from .stage import Stage


@dataclass
class Pipeline:
    """Runs micro batches through the stages of all ranks.

    Attributes:
        stages: this rank's stages by number.
        cut: the division of the model into stages.
        group: process group of the pipeline axis.
        device: the device of this rank.
        schedule: the name of a schedule of torch.distributed.pipelining, or a schedule file.
        micro_batches: number of micro batches of a step.
        hidden: an example of the hidden states that stages send each other, for one row: [1, S, D]
            on the meta device, in the compute dtype.
        reduces_often: whether FSDP reduces gradients after each micro batch, not once a step.
    """

    stages: dict[int, Stage]
    cut: StageSplit
    group: ProcessGroup
    device: torch.device
    schedule: str | ScheduleFile
    micro_batches: int
    hidden: Tensor
    reduces_often: bool = False
    _factor: Tensor | None = field(default=None, init=False)
    _built: Any = field(default=None, init=False)

    @property
    def has_end(self) -> bool:
        """Whether this rank computes the loss."""
        return self.cut.stages - 1 in self.stages

    def forward_backward(
        self, batches: Sequence[Batch], objective: Objective, factor: Tensor
    ) -> Tensor:
        """Run forward and backward over a step, which adds to the gradients of the parameters.

        Args:
            batches: one batch with all rows of the step; the schedule cuts it into micro batches.
            objective: what is learned.
            factor: multiplies the sums that are minimised, a scalar or [K] on the device.

        Returns:
            the sums over all rows, [num_sums], on the rank of the last stage, and zeros on the
            others, so that a sum over ranks is right.
        """
        (batch,) = batches
        self._factor = factor
        self._set_objective(objective)
        x = objective.input(batch)
        self._built = self._built or self._build(x)
        args = (x,) if 0 in self.stages else ()
        # torch requires a target to compute a loss. The batch goes to the stage by keyword, because
        # the head computes the loss itself.
        target = torch.zeros(len(x), device=self.device) if self.has_end else None
        arguments = self._arguments(batch, objective, x, with_loss=self.has_end)
        for stage in self.stages.values():
            hold_gradients(stage)
        self._built.step(*args, target=target, return_outputs=False, **arguments)
        return self._take_sums(objective)

    def _set_objective(self, objective: Objective) -> None:
        for stage in self.stages.values():
            stage.objective = objective

    def _build(self, x: Tensor) -> Any:
        rows = len(x) // self.micro_batches
        # torch (2.13) also takes strides from the examples, and rows of an expanded tensor overlap;
        # with requires_grad it allocates buffers for the gradients that stages send back.
        hidden = self.hidden.expand(rows, -1, -1).contiguous().requires_grad_()
        stages, make_stage = [], ReducingStage if self.reduces_often else CountingStage
        for number, stage in self.stages.items():
            stages.append(
                make_stage(
                    stage,
                    number,
                    self.cut.stages,
                    self.device,
                    # Known sizes spare the first step a trial run on `meta`.
                    input_args=x[:rows].to("meta") if stage.is_first else hidden,
                    output_args=torch.empty(1, device="meta") if stage.is_last else hidden,
                    group=self.group,
                )
            )
        # `factor` divides by the step's counts; torch would divide by the micro batches as well.
        options: Any = {"loss_fn": self._scaled, "scale_grads": False}
        if isinstance(self.schedule, ScheduleFile):
            # The steps of `_load_csv` (torch 2.13), for actions that were read and checked before.
            kind: Any = PipelineScheduleRuntime
            runtime = kind(stages, self.micro_batches, **options)
            runtime.pipeline_order = {
                rank: [PipelineAction.from_str(str(action)) for action in row]
                for rank, row in enumerate(self.schedule.rows)
            }
            runtime._prepare_schedule_with_comms(runtime.pipeline_order)
            return runtime
        kind = get_schedule_class(self.schedule)
        which: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        return kind(which, self.micro_batches, **options)

    def _scaled(self, loss: Tensor, target: Tensor) -> Tensor:
        assert self._factor is not None, "set before the schedule runs"
        return (loss * self._factor).sum()

    @torch.no_grad()
    def evaluate(self, batch: Batch, objective: Objective) -> Tensor:
        """Return the sums of a batch on the rank of the last stage, and zeros on the others.

        Without gradients nothing is kept between stages, so that a batch passes in one piece.
        """
        self._set_objective(objective)
        x = objective.input(batch)
        hidden = self.hidden.expand(len(x), -1, -1)
        self._through(
            x,
            hidden,
            lambda number: self._arguments(
                batch, objective, x, with_loss=self.stages[number].is_last
            ),
        )
        return self._take_sums(objective)

    def take_record(self) -> Any:
        """Return the criterion of the last forward pass, or None without the last stage."""
        if not self.has_end:
            return None
        stage = self.stages[self.cut.stages - 1]
        record, stage.record = stage.record, None  # its outputs are freed with it
        return record

    def _take_sums(self, objective: Objective) -> Tensor:
        """Return the sums of all passes since the last call; zeros without the last stage."""
        if not self.has_end:
            return torch.zeros(objective.num_sums, device=self.device)
        found = self.stages[self.cut.stages - 1].sums
        sums = torch.stack(found, 1).sum(1)
        found.clear()
        return sums

    @torch.no_grad()
    def last_outputs(
        self, x: Tensor, columns: Callable[[int], Mapping[str, Any]], width: int
    ) -> Tensor:
        """Return the outputs of the last position, [B, 1, width], on all ranks.

        Args:
            x: [B, S], the same on all ranks; neither positions nor heads are split.
            columns: maps a stage's number to the further arguments of that stage's forward pass.
            width: number of outputs of a position.
        """
        hidden = self.hidden.new_empty(*x.shape, self.hidden.shape[-1])
        found = self._through(x, hidden, columns)
        if found is None:
            outputs = torch.empty(len(x), 1, width, device=self.device)
        else:
            outputs = found[:, -1:].contiguous()
        # All ranks go on from these outputs, and so must see the same bits.
        dist.broadcast(outputs, group=self.group, group_src=self.cut.stage_to_rank[-1])
        return outputs

    def _through(
        self, x: Tensor, hidden: Tensor, columns: Callable[[int], Mapping[str, Any]]
    ) -> Tensor | None:
        """Return the output of the last stage on the rank that holds it, and None on the others.

        Args:
            x: what the first stage takes, [B, S, ...].
            hidden: an example of the hidden states between stages, [B, S, D].
            columns: maps a stage's number to the further arguments of that stage's forward pass.
        """
        # Blocking messages cannot deadlock: each rank runs its stages in ascending order.
        for number, stage in self.stages.items():
            if number:
                x = self._receive(x, hidden, self.cut.rank_of(number - 1))
            x = stage(x, **columns(number))
            if not stage.is_last:
                self._send(x, self.cut.rank_of(number + 1))
        return x if self.has_end else None

    def _receive(self, x: Tensor, like: Tensor, rank: int) -> Tensor:
        if rank == self.group.rank():
            return x
        x = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        dist.recv(x, group=self.group, group_src=rank)
        return x

    def _send(self, x: Tensor, rank: int) -> None:
        if rank != self.group.rank():
            dist.send(x.contiguous(), group=self.group, group_dst=rank)

    @staticmethod
    def _arguments(
        batch: Batch, objective: Objective, x: Tensor, *, with_loss: bool
    ) -> dict[str, Any]:
        """Return what stages get besides inputs or hidden states, by argument name."""
        arguments = {k: v for k, v in objective.arguments(batch).items() if v is not None}
        # Later stages see no inputs, from which a model would number the positions.
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        arguments.setdefault("positions", positions)
        return arguments | ({"batch": batch.columns()} if with_loss else {})


def require_split_backward(schedule: str | ScheduleFile) -> None:
    """Check that this torch can run the schedule's separate passes for inputs and for weights.

    Raises:
        EnvironmentFault: it cannot: before version 2.13 torch takes autograd functions that are
            written in Python for old ones there, and refuses them.
    """
    if isinstance(schedule, str):
        splits, name = schedule in SPLIT_BACKWARD, schedule
    else:
        splits, name = schedule.splits_backward, "the schedule"
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if splits and version < (2, 13):
        raise EnvironmentFault(
            f"{name} splits the backward pass, and torch {torch.__version__} cannot",
            "install torch 2.13 or later, or take another schedule, such as 1F1B",
        )
