"""Splits a model into pipeline stages, and wraps this rank's stages for training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ....model_zoo.base import Model
from ....model_zoo.layout import Layout
from ..axis import AxisParts, LocalParts, LocalRank, ParallelModel, SplitSettings, StepSettings
from ..gradient_reduction import make_tied_reduction
from .cut import StageSplit, cut_blocks
from .pipeline import Pipeline, require_split_backward
from .schedule_file import read_schedule
from .stage import Stage

if TYPE_CHECKING:
    from ....model_zoo.config import ModelConfig


@dataclass(frozen=True)
class PipelineParallel(AxisParts):
    """Gives each rank of the pipeline axis some stages of the model.

    Attributes:
        local: this rank.
        mesh: the pipeline axis of the device mesh.
    """

    local: LocalRank
    mesh: DeviceMesh

    def split(
        self,
        model: Model,
        config: ModelConfig,
        parts: LocalParts,
        settings: SplitSettings,
    ) -> LocalParts:
        """Remove from the model everything that no stage of this rank computes."""
        table, rank = self.local.table.pipelining, self.mesh.get_local_rank()
        cut = cut_blocks(table, self.mesh.size(), config, settings.costs)
        prune(model, config.layout, cut, rank)
        stages = {n: Stage(model, config.layout, cut, n) for n in cut.stages_of(rank)}
        width = config.dim  # type: ignore[attr-defined]
        return replace(parts, stages=stages, cut=cut, hidden_width=width)

    def wrap(
        self, wrapped: ParallelModel, parts: LocalParts, settings: StepSettings
    ) -> ParallelModel:
        """Run micro batches through the stages; sum the gradients of an embedding at both ends."""
        assert parts.cut is not None, "`split` sets it"
        model, group, rank = wrapped.model, self.mesh.get_group(), self.mesh.get_local_rank()
        other = parts.cut.other_end(rank)
        if other is not None:
            tied = tuple(model.get_submodule(parts.embed).parameters())
            add = make_tied_reduction(other, tied, group, self.local.device)
            wrapped = replace(
                wrapped,
                # Last: both ends must hold the sums over the other axes.
                post_backward_reductions=[*wrapped.post_backward_reductions, add],
                # Of the two equal copies, the gradient norm counts the lower rank's alone.
                duplicate_parameters=tied if other < rank else (),
            )
        table = self.local.table.pipelining
        schedule = read_schedule(Path(table.csv)) if table.csv else table.schedule
        require_split_backward(schedule)
        # Between blocks, a rank of the context or tensor axis holds a part of each sequence.
        length = settings.num_positions // self.local.degrees.sequence
        is_sharded = self.local.table.uses_fsdp(self.local.degrees)
        pipeline = Pipeline(
            parts.stages,
            parts.cut,
            group,
            self.local.device,
            schedule,
            settings.micro_batches,
            torch.empty(1, length, parts.hidden_width, dtype=model.compute_dtype, device="meta"),
            is_sharded and self.local.table.fsdp.reduce_every == "micro_batch",
        )
        return replace(wrapped, pipeline=pipeline)


def make_axis(local: LocalRank) -> PipelineParallel:
    """Return what the pipeline axis does on this rank."""
    assert local.mesh is not None, "a plan with a pipeline has a mesh"
    return PipelineParallel(local, local.mesh["pipeline"])


def prune(model: Model, layout: Layout, cut: StageSplit, rank: int) -> None:
    """Remove from a model all modules that no stage of a rank computes, in place.

    The other modules keep their names.

    Args:
        model: the whole model on the meta device.
        layout: names of the model's embedding, blocks and head.
        cut: the division into stages.
        rank: this rank's number in the pipeline.
    """
    # Checkpoints and exports need the names and shapes of the weights that other ranks hold.
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in model.saved_buffers().items()}
    stages = cut.stages_of(rank)
    kept = {str(number) for stage in stages for number in cut.held_blocks(stage)}
    blocks = model.get_submodule(layout.blocks)
    for name in list(blocks._modules):
        if name not in kept:
            # `del blocks[i]` would renumber the blocks behind it, and checkpoints go by names.
            del blocks._modules[name]
    if not any(map(cut.has_embedding, stages)):
        _remove(model, layout.embed)
    if cut.stages - 1 not in stages:
        _remove(model, layout.head)
    for name, _ in model.named_parameters():
        del shapes[name]
    for name in model.saved_buffers():
        del buffers[name]
    model.remote_parameters, model.remote_buffers = shapes, buffers


def _remove(model: nn.Module, path: str) -> None:
    # The attribute stays, as None: it is listed neither in parameters nor in the state dict.
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = None
