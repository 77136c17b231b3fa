"""One rank's view of how all of them share a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ..recipe.tables import Parallel
from . import data
from .cut import Cut, cut_blocks
from .data import Parallelized
from .local import local
from .mesh import Degrees, build_mesh, context_group, resolve_degrees

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...kernels.choose import Kernels
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ..data.batch import Batch
    from .context import ContextParallel
    from .pipeline import Stage


@dataclass(frozen=True)
class Plan:
    """How the ranks share a run, and this rank's place in it.

    Attributes:
        table: the recipe's `[parallel]`.
        degrees: with -1 settled.
        rank: this one.
        device: of this rank.
        mesh: on which parameters are placed; None where each rank holds them whole.
        context: how sequences are split; None where they are not.
    """

    table: Parallel
    degrees: Degrees
    rank: int
    device: torch.device
    mesh: DeviceMesh | None
    context: ContextParallel | None

    @property
    def data_rank(self) -> int:
        """Which of the ranks that read different samples this is."""
        return self.degrees.data_rank(self.rank)

    def kernels(self, kernels: Kernels, config: ModelConfig) -> Kernels:
        """Return kernels that compute this rank's part of attention and loss."""
        if self.context:
            kernels = self.context.kernels(kernels)
        if self.mesh and self.degrees.tensor > 1:
            from .tensor import split_vocabulary

            kernels = split_vocabulary(kernels, config.vocab, self.mesh["tensor"])
        return kernels

    def take(self, batch: Batch) -> Batch:
        """Return what this rank computes of rows that its group reads."""
        return self.context.take(batch) if self.context else batch

    def split(
        self, model: LanguageModel, config: ModelConfig, compute: torch.dtype, reduce: torch.dtype
    ) -> Pieces:
        """Split a model (still on `meta`) over ranks, in place; its parameters keep their names."""
        layout, stages, cut, width, whole = config.layout, {}, None, 0, set[str]()
        if self.degrees.pipeline > 1:
            from .pipeline import Stage, prune

            place = self.degrees.coordinate(self.rank).pipeline
            cut = cut_blocks(self.table.pipelining, self.degrees.pipeline, config)
            width = config.dim  # type: ignore[attr-defined]
            prune(model, layout, cut, place)
            stages = {n: Stage(model, layout, cut, n) for n in cut.stages_of(place)}
        if self.mesh and self.degrees.tensor > 1:
            from .tensor import split

            whole = split(model, config, self.mesh["tensor"])
        if self.mesh and data.uses_fsdp(self.table, self.degrees):
            units = stages.values()
            data.shard(model, layout, self.table, self.mesh, self.device, compute, reduce, units)
        return Pieces(whole, stages, cut, width)

    def parallelize(
        self,
        model: LanguageModel,
        pieces: Pieces,
        reduce: torch.dtype,
        *,
        seq_len: int,
        micro_batches: int,
    ) -> Parallelized:
        """Return the model ready for training, its parameters in place on the device.

        Args:
            model: split already.
            pieces: how.
            reduce: dtype of the reduction of gradients.
            seq_len: of the data.
            micro_batches: into how many a pipeline cuts the rows of a step.
        """
        by_fsdp = data.uses_fsdp(self.table, self.degrees)
        found = data.parallelize(model, by_fsdp, self.degrees, self.device, reduce)
        if pieces.whole and self.mesh is not None:
            weights = [w for name, w in model.named_parameters() if name in pieces.whole]
            finish = _summing(weights, self.mesh.get_group("tensor"), self.device)
            found = replace(found, finish_gradients=finish)
        if pieces.cut is not None and self.mesh is not None:
            from .pipeline import Pipeline

            length = seq_len // self.degrees.context // self.degrees.tensor
            pipeline = Pipeline(
                pieces.stages,
                pieces.cut,
                self.mesh.get_group("pipeline"),
                self.device,
                self.table.pipelining.schedule,
                micro_batches,
                torch.empty(1, length, pieces.width, dtype=model.compute_dtype, device="meta"),
            )
            found = replace(found, pipeline=pipeline)
        return found


@dataclass(frozen=True)
class Pieces:
    """What a rank has of a model.

    Attributes:
        whole: weights whose gradients are to be summed over the tensor axis.
        stages: of the pipeline, by number.
        cut: into stages; None without a pipeline.
        width: of the hidden states that pass between them.
    """

    whole: set[str] = field(default_factory=set)
    stages: dict[int, Stage] = field(default_factory=dict)
    cut: Cut | None = None
    width: int = 0


def make_plan(table: Parallel, rank: int, ranks: int, device: torch.device) -> Plan:
    """Return a rank's plan; all ranks call it.

    Raises:
        RecipeError: the degrees do not multiply to the number of ranks.
    """
    degrees = resolve_degrees(table, ranks)
    sharded = data.is_sharded(table, degrees)
    mesh = context = None
    if sharded or degrees.tensor > 1 or degrees.pipeline > 1:
        mesh = build_mesh(degrees, device.type, sharded=sharded)
    if degrees.context > 1:
        from .context import ContextParallel

        group = context_group(degrees, device.type)
        context = ContextParallel(group, degrees.coordinate(rank).context, degrees.context)
    return Plan(table, degrees, rank, device, mesh, context)


def _summing(
    weights: list[nn.Parameter], group: dist.ProcessGroup, device: torch.device
) -> Callable[[], None]:
    """Return what sums the gradients of weights over a group, in one collective."""

    def finish() -> None:
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
        dist.all_reduce(flat, group=group)
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    return finish
