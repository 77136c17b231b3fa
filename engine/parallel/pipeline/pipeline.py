"""Pipeline parallelism: each rank holds some of the blocks, and micro batches pass from stage to
stage (schedules of torch.distributed.pipelining).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from ....model_zoo.language_model import LanguageModel, LossFunction, LossRecord
from ....model_zoo.layout import Layout
from ...core.heartbeat import heartbeat
from ...data.batch import Batch
from .cut import StageSplit
from .schedule_file import ScheduleFile


class Stage(nn.Module):
    """Consecutive blocks of a model, with the embedding or the head at its ends.

    Args:
        model: the model after `split.prune`; its `forward` computes the given blocks.
        layout: names of the model's embedding, blocks and head.
        cut: the division into stages.
        number: number of this stage.
    """

    def __init__(self, model: LanguageModel, layout: Layout, cut: StageSplit, number: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number == cut.stages - 1
        blocks = cut.blocks(number)
        # In `LanguageModel.forward` the head is the block after the last.
        self.numbers = range(blocks.start, blocks.stop + self.is_last)
        self._borrowed: list[nn.Module] = []
        self._uncalled: list[nn.Module] = []  # modules whose weights are used without a call
        self.loss: LossFunction | None = None
        self.num_sources = 0
        self.sums: list[Tensor] = []
        """the result of `LossRecord.sums`, [2 + num_sources], for each forward pass with a loss"""
        # The modules are the model's own: FSDP and the schedule look for them here.
        self.parts = nn.ModuleList(
            model.get_submodule(f"{layout.blocks}.{number}") for number in blocks
        )
        if cut.has_embedding(number):
            embedding = model.get_submodule(layout.embed)
            if self.is_first:
                self.parts.append(embedding)
            elif cut.rank_of(0) == cut.rank_of(number):
                # A module can be in one FSDP root alone, and that is the first stage.
                self._borrowed = [embedding]
            else:
                # The head reads the tied weight and never calls the embedding, so that FSDP's
                # pre-forward hook does not gather it.
                self.parts.append(embedding)
                self._uncalled = [embedding]
        if self.is_last:
            self.parts.append(model.get_submodule(layout.head))
        self._model = [model]  # in a list, so that nothing is registered twice

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the weights whose gradients the schedule computes, borrowed ones included."""
        # Zero-bubble schedules compute the weight gradients of these parameters only.
        yield from super().parameters(recurse)
        for module in self._borrowed:
            yield from module.parameters()

    def forward(self, x: Tensor, *, sources: Tensor | None = None, **columns: Any) -> Tensor:
        """Map tokens [B, S] or hidden states [B, S, D] to hidden states, the loss [1] or logits."""
        # The watchdog sees progress in each micro batch: a pipeline's step is one long phase.
        heartbeat.touch()
        for module in self._uncalled:
            if gather := getattr(module, "unshard", None):
                gather()
        # The schedule passes keyword arguments to all stages of a rank, labels too.
        is_loss = self.is_last and "labels" in columns
        record = LossRecord(self.loss) if is_loss and self.loss else None
        out: Tensor = self._model[0](
            x if self.is_first else None,
            hidden=None if self.is_first else x,
            blocks=self.numbers,
            loss=record,
            **columns,
        )
        if record:
            # On the device: reading the sums here would wait for each micro batch.
            self.sums.append(record.sums(out, sources, self.num_sources))
        return out if out.ndim else torch.stack([out])


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
    """

    stages: dict[int, Stage]
    cut: StageSplit
    group: ProcessGroup
    device: torch.device
    schedule: str | ScheduleFile
    micro_batches: int
    hidden: Tensor
    _factor: Tensor | None = field(default=None, init=False)
    _built: Any = field(default=None, init=False)

    @property
    def has_end(self) -> bool:
        """Whether this rank computes the loss."""
        return self.cut.stages - 1 in self.stages

    def forward_backward(
        self, batches: Sequence[Batch], loss: LossFunction, factor: Tensor, num_sources: int = 0
    ) -> Tensor:
        """Run forward and backward over a step, which adds to the gradients of the parameters.

        Args:
            batches: one batch with all rows of the step; the schedule cuts it into micro batches.
            loss: the loss function of the recipe.
            factor: scalar on the device that multiplies the loss.
            num_sources: number of sources whose losses are reported apart.

        Returns:
            `LossRecord.sums` over all rows, [2 + num_sources], on the rank of the last stage, and
            zeros on the others, so that a sum over ranks is right.
        """
        (batch,) = batches
        self._factor = factor
        self._set_loss(loss, num_sources)
        self._built = self._built or self._build(batch)
        args = (batch.tokens,) if 0 in self.stages else ()
        # torch requires a target to compute a loss. The labels go to the stage by keyword, because
        # the head computes the loss itself.
        target = torch.zeros(len(batch.tokens), device=self.device) if self.has_end else None
        self._built.step(
            *args, target=target, return_outputs=False, **self._columns(batch, self.has_end)
        )
        return self._take_sums(num_sources)

    def _set_loss(self, loss: LossFunction, num_sources: int) -> None:
        for stage in self.stages.values():
            stage.loss, stage.num_sources = loss, num_sources

    def _build(self, batch: Batch) -> Any:
        rows = len(batch.tokens) // self.micro_batches
        # torch (2.13) also takes strides from the examples, and rows of an expanded tensor overlap;
        # with requires_grad it allocates buffers for the gradients that stages send back.
        hidden = self.hidden.expand(rows, -1, -1).contiguous().requires_grad_()
        stages = []
        for number, stage in self.stages.items():
            stages.append(
                PipelineStage(
                    stage,
                    number,
                    self.cut.stages,
                    self.device,
                    # Known sizes spare the first step a trial run on `meta`.
                    input_args=batch.tokens[:rows].to("meta") if stage.is_first else hidden,
                    output_args=torch.empty(1, device="meta") if stage.is_last else hidden,
                    group=self.group,
                )
            )
        # `factor` divides by the step's tokens; torch would divide by the micro batches as well.
        options: Any = {"loss_fn": self._scaled, "scale_grads": False}
        if isinstance(self.schedule, ScheduleFile):
            # The steps of `_load_csv` (torch 2.13), for actions that were read and checked before.
            kind: Any = _PipelineScheduleRuntime
            runtime = kind(stages, self.micro_batches, **options)
            runtime.pipeline_order = {
                rank: [_Action.from_str(str(action)) for action in row]
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
    def evaluate(self, batch: Batch, loss: LossFunction, num_sources: int = 0) -> Tensor:
        """Return `LossRecord.sums` of a batch on the rank of the last stage, and zeros elsewhere.

        Without gradients nothing is kept between stages, so that a batch passes in one piece.
        """
        self._set_loss(loss, num_sources)
        hidden = self.hidden.expand(len(batch.tokens), -1, -1)
        self._through(
            batch.tokens, hidden, lambda number: self._columns(batch, self.stages[number].is_last)
        )
        return self._take_sums(num_sources)

    def _take_sums(self, num_sources: int) -> Tensor:
        """Return the sums of all passes since the last call; zeros without the last stage."""
        if not self.has_end:
            return torch.zeros(2 + num_sources, device=self.device)
        found = self.stages[self.cut.stages - 1].sums
        sums = torch.stack(found, 1).sum(1)
        found.clear()
        return sums

    @torch.no_grad()
    def next_logits(
        self, tokens: Tensor, columns: Callable[[int], Mapping[str, Any]], vocab: int
    ) -> Tensor:
        """Return the logits of the last position, [B, 1, V], on all ranks.

        Args:
            tokens: [B, S], the same on all ranks; neither positions nor heads are split.
            columns: maps a stage's number to the further arguments of that stage's forward pass.
            vocab: number of logits, V.
        """
        hidden = self.hidden.new_empty(*tokens.shape, self.hidden.shape[-1])
        found = self._through(tokens, hidden, columns)
        if found is None:
            logits = torch.empty(len(tokens), 1, vocab, device=self.device)
        else:
            logits = found[:, -1:].contiguous()
        # All ranks choose the next token, and so must see the same bits.
        dist.broadcast(logits, group=self.group, group_src=self.cut.stage_to_rank[-1])
        return logits

    def _through(
        self, x: Tensor, hidden: Tensor, columns: Callable[[int], Mapping[str, Any]]
    ) -> Tensor | None:
        """Return the output of the last stage on the rank that holds it, and None on the others.

        Args:
            x: tokens, [B, S].
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
    def _columns(batch: Batch, with_labels: bool) -> dict[str, Tensor]:
        """Return what stages get besides tokens or hidden states, by argument name."""
        positions = batch.positions
        # Later stages see no tokens, from which a model would number the positions.
        if positions is None:
            length = batch.tokens.shape[1]
            positions = torch.arange(length, device=batch.tokens.device).expand_as(batch.tokens)
        columns = {
            "positions": positions,
            "document_ids": batch.document_ids,
            "padding_mask": batch.padding_mask,
        }
        if with_labels:
            columns |= {"labels": batch.labels, "sources": batch.sources}
        return {name: column for name, column in columns.items() if column is not None}
