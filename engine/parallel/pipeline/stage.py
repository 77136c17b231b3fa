"""A stage of a pipeline: consecutive blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....model_zoo.base import Model
from ....model_zoo.layout import Layout
from ...core.heartbeat import heartbeat
from .cut import StageSplit
from .objective import Objective


class Stage(nn.Module):
    """Consecutive blocks of a model, with the embedding or the head at its ends.

    Args:
        model: the model after `split.prune`; its `forward` computes the given blocks.
        layout: names of the model's embedding, blocks and head.
        cut: the division into stages.
        number: number of this stage.
    """

    def __init__(self, model: Model, layout: Layout, cut: StageSplit, number: int) -> None:
        super().__init__()
        self.is_first, self.is_last = number == 0, number == cut.stages - 1
        blocks = cut.blocks(number)
        # In `LanguageModel.forward` the head is the block after the last.
        self.numbers = range(blocks.start, blocks.stop + self.is_last)
        self._borrowed: list[nn.Module] = []
        self._uncalled: list[nn.Module] = []  # modules whose weights are used without a call
        self.has_whole_backward = self.is_last and cut.repeats_embedding
        """whether one backward pass computes the gradients of inputs and of weights"""
        self.objective: Objective | None = None
        self.sums: list[Tensor] = []
        """the sums of each forward pass with a loss, [num_sums]"""
        self.record: Any = None
        """the criterion of the last forward pass with a loss"""
        # The modules are the model's own: FSDP and the schedule look for them here.
        self.parts = nn.ModuleList(
            model.get_submodule(f"{layout.blocks}.{block}") for block in cut.computed_blocks(number)
        )
        if cut.has_embedding(number):
            embedding = model.get_submodule(layout.embed)
            if self.is_first:
                self.parts.append(embedding)
            elif cut.rank_of(0) == cut.rank_of(number):
                # A module can be in one FSDP root alone, and that is the first stage.
                self._borrowed = [embedding]
            else:
                # A head that reads the tied weight never calls the embedding, so that FSDP's
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

    def forward(
        self, x: Tensor, *, batch: Mapping[str, Tensor] | None = None, **arguments: Any
    ) -> Tensor:
        """Map inputs of the model or hidden states [B, S, D] to hidden states, sums or outputs.

        Args:
            x: what the first stage takes, or hidden states.
            batch: the fields of the batch; with them the last stage computes the loss.
            arguments: further arguments of the model.
        """
        # The watchdog sees progress in each micro batch: a pipeline's step is one long phase.
        heartbeat.touch()
        for module in self._uncalled:
            if gather := getattr(module, "unshard", None):
                gather()
        # The schedule passes keyword arguments to all stages of a rank, the batch too.
        record, inputs = None, x if self.is_first else None
        if self.is_last and batch is not None and self.objective:
            micro_batch = self.objective.batch_class.from_columns(batch)
            record = self.objective.record(micro_batch)
            # For a model that predicts further positions from the inputs there.
            inputs = self.objective.input(micro_batch)
            arguments |= self.objective.loss_arguments(micro_batch, record)
        out: Tensor = self._model[0](
            inputs,
            hidden=None if self.is_first else x,
            blocks=self.numbers,
            **arguments,
        )
        if record:
            # On the device: reading the sums here would wait for each micro batch.
            self.sums.append(record.sums(out))
            self.record = record
        return out if out.ndim else torch.stack([out])
