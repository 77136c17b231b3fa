"""One rank's view of how all of them share a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import data
from .data import Parallelized
from .finish import reducing
from .mesh import (
    Degrees,
    build_expert_mesh,
    build_mesh,
    context_group,
    is_sharded,
    resolve_degrees,
    uses_fsdp,
)
from .pipeline.cut import Cut, EndCosts, cut_blocks
from .pipeline.schedule_file import read_schedule
from .placement import locate, refuse_misfits
from .tables import Parallel
from .tensor.async_tensor import overlap

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...kernels.choose import Kernels
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ..data.batch import Batch
    from .context.context import ContextParallel
    from .pipeline.pipeline import Stage


log = logging.getLogger(__name__)


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

    @property
    def measures_cut(self) -> bool:
        """Whether a pipeline's stages are balanced by measurement."""
        return self.degrees.pipeline > 1 and self.table.pipelining.cost == "measured"

    def kernels(self, kernels: Kernels, config: ModelConfig) -> Kernels:
        """Return kernels that compute this rank's part of attention and loss."""
        if self.context:
            kernels = self.context.kernels(kernels)
        if self.mesh and self.degrees.tensor > 1:
            from .tensor.tensor import split_vocabulary

            kernels = split_vocabulary(kernels, config.vocab, self.mesh["tensor"])
        return kernels

    def take(self, batch: Batch, model: LanguageModel) -> Batch:
        """Return what this rank computes of rows that its group reads, as its model takes them."""
        if not model.takes_padding:
            batch = replace(batch, padding_mask=None)
        return self.context.take(batch) if self.context else batch

    def split(
        self,
        model: LanguageModel,
        config: ModelConfig,
        compute: torch.dtype,
        reduce: torch.dtype,
        costs: EndCosts | None = None,
    ) -> Pieces:
        """Split a model (still on `meta`) over ranks, in place; its parameters keep their names.

        Args:
            model: whole.
            config: its.
            compute: dtype of gathered weights.
            reduce: dtype of the reduction of gradients.
            costs: by which a pipeline's stages are balanced; None: estimated.
        """
        layout, stages, cut, width, whole = config.layout, {}, None, 0, set[str]()
        kept = set[str]()
        placed = self._place(model, config)
        if self.context:
            self.context.join_counts(model)
        if self.degrees.pipeline > 1:
            from .pipeline.pipeline import Stage, prune

            place = self.degrees.coordinate(self.rank).pipeline
            cut = cut_blocks(self.table.pipelining, self.degrees.pipeline, config, costs)
            width = config.dim  # type: ignore[attr-defined]
            prune(model, layout, cut, place)
            stages = {n: Stage(model, layout, cut, n) for n in cut.stages_of(place)}
        if self.mesh and self.degrees.tensor > 1:
            from .tensor.tensor import split

            if self.table.async_tensor:
                overlap(self.mesh["tensor"].get_group(), self.device)
            stored = {n: dims["tensor"] for n, dims in placed.items() if "expert" not in dims}
            whole = split(model, config, self.mesh["tensor"], stored)
        if self.mesh and uses_fsdp(self.table, self.degrees):
            units, sharded = stages.values(), is_sharded(self.table, self.degrees)
            experts = self._share_experts(model, placed, sharded)
            if sharded:
                kept = self._keep_whole(model, placed, self.mesh)
            placing = data.placing(model, placed, kept) if self.table.rules else {}
            data.shard(
                model,
                layout,
                self.table,
                self.mesh,
                self.device,
                compute,
                reduce,
                units,
                placing,
                experts,
            )
        return Pieces(whole, stages, cut, width, kept, layout.embed)

    def _share_experts(
        self, model: nn.Module, placed: Mapping[str, Mapping[str, int | None]], sharded: bool
    ) -> data.Experts | None:
        if self.degrees.expert_ranks == 1:
            return None
        from .expert import share_experts

        mesh = build_expert_mesh(self.degrees, self.device.type, sharded=sharded)
        modules = share_experts(model, mesh, self.degrees, placed)
        return data.Experts(mesh, modules, data.placing(model, placed, ())["shard_placement_fn"])

    def _place(self, model: LanguageModel, config: ModelConfig) -> dict[str, dict[str, int | None]]:
        """Return the dims that are cut of each parameter of a model that is whole as yet.

        Raises:
            RecipeError: rules that the model's parameters cannot follow.
        """
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        refuse_misfits(shapes, config, self.table, self.degrees)
        found = locate(shapes, config, self.table, self.degrees)
        return {each.name: each.place for each in found}

    def _keep_whole(
        self, model: nn.Module, placed: Mapping[str, Mapping[str, int | None]], mesh: DeviceMesh
    ) -> set[str]:
        """Let every rank store what no axis cuts, where FSDP would cut it; return their names."""
        names = {name for name, _ in model.named_parameters() if placed[name]["shard"] is None}
        if names:
            from .tensor.weights import keep_whole

            axes = ("replicate", "shard", "tensor")
            used = tuple(axis for axis in axes if axis == "shard" or mesh[axis].size() > 1)
            keep_whole(model, names, mesh[used])
        return names

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
        found = data.parallelize(model, self.table, self.degrees, self.device, reduce)
        if self.mesh is None:
            return found
        whole = [w for name, w in model.named_parameters() if name in pieces.whole]
        kept = [w for name, w in model.named_parameters() if name in pieces.kept]
        finish = [reducing(whole, kept, self.mesh, self.device)]
        if pieces.cut is not None:
            from .pipeline.pipeline import Pipeline

            group, place = self.mesh.get_group("pipeline"), self.mesh.get_local_rank("pipeline")
            other = pieces.cut.other_end(place)
            if other is not None:
                from .tied import summing_with

                tied = tuple(model.get_submodule(pieces.embed).parameters())
                finish.append(summing_with(other, tied, group, self.device))
                found = replace(found, counted_elsewhere=tied if other < place else ())
            table = self.table.pipelining
            length = seq_len // self.degrees.context // self.degrees.tensor
            pipeline = Pipeline(
                pieces.stages,
                pieces.cut,
                group,
                self.device,
                read_schedule(Path(table.csv)) if table.csv else table.schedule,
                micro_batches,
                torch.empty(1, length, pieces.width, dtype=model.compute_dtype, device="meta"),
            )
            found = replace(found, pipeline=pipeline)
        return replace(found, finish_gradients=finish, late={*whole, *kept})


@dataclass(frozen=True)
class Pieces:
    """What a rank has of a model.

    Attributes:
        whole: weights whose gradients are to be summed over the tensor axis.
        stages: of the pipeline, by number.
        cut: into stages; None without a pipeline.
        width: of the hidden states that pass between them.
        kept: weights that FSDP ignores: their gradients are to be averaged over the data axes.
        embed: path of the embedding.
    """

    whole: set[str] = field(default_factory=set)
    stages: dict[int, Stage] = field(default_factory=dict)
    cut: Cut | None = None
    width: int = 0
    kept: set[str] = field(default_factory=set)
    embed: str = ""


def make_plan(table: Parallel, rank: int, ranks: int, device: torch.device) -> Plan:
    """Return a rank's plan; all ranks call it.

    Raises:
        RecipeError: the degrees do not multiply to the number of ranks.
    """
    degrees = resolve_degrees(table, ranks)
    sharded = is_sharded(table, degrees)
    mesh = context = None
    split = degrees.tensor * degrees.pipeline * degrees.expert_ranks > 1
    if sharded or split:
        mesh = build_mesh(degrees, device.type, sharded=sharded)
    if degrees.context > 1:
        from .context.context import ContextParallel

        group = context_group(degrees, device.type)
        place, in_ring = degrees.coordinate(rank).context, table.context_exchange == "ring"
        context = ContextParallel(group, place, degrees.context, in_ring)
    elif table.context_exchange == "ring" and rank == 0:
        log.warning('parallel.context_exchange = "ring" has no effect: parallel.context is 1')
    return Plan(table, degrees, rank, device, mesh, context)
