"""The parallelism plan: which ranks hold and compute which part of a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import data
from .collectives import fuse_with_matmuls
from .data import ParallelModel
from .gradient_reduction import make_replicated_reduction, make_tied_reduction
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
    """The parallelism plan of a run, from the view of one rank.

    Attributes:
        table: the recipe's `[parallel]`.
        degrees: the size of each axis, with -1 replaced.
        rank: this rank.
        device: the device of this rank.
        mesh: the mesh over which parameters are placed; None: every rank holds them whole.
        context: splits sequences over the context axis; None without context parallelism.
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
    ) -> LocalParts:
        """Split a model on the meta device over ranks, in place; parameters keep their names.

        Args:
            model: the whole model.
            config: the model's config.
            compute: dtype of gathered parameters.
            reduce: dtype of gradient reduction.
            costs: measured costs by which pipeline stages are balanced; None: estimated ones.
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
                fuse_with_matmuls(self.mesh["tensor"].get_group(), self.device)
            stored = {n: dims["tensor"] for n, dims in placed.items() if "expert" not in dims}
            whole = split(model, config, self.mesh["tensor"], stored)
        if self.mesh and uses_fsdp(self.table, self.degrees):
            units, sharded = stages.values(), is_sharded(self.table, self.degrees)
            experts = self._shard_experts(model, placed, sharded)
            if sharded:
                kept = self._replicate_parameters(model, placed, self.mesh)
            placement_arguments = (
                data.fsdp_placement_arguments(model, placed, kept) if self.table.rules else {}
            )
            data.apply_fsdp(
                model,
                layout,
                self.table,
                self.mesh,
                self.device,
                compute,
                reduce,
                units,
                placement_arguments,
                experts,
            )
        return LocalParts(whole, stages, cut, width, kept, layout.embed)

    def _shard_experts(
        self, model: nn.Module, placed: Mapping[str, Mapping[str, int | None]], sharded: bool
    ) -> data.ExpertSharding | None:
        if self.degrees.expert_ranks == 1:
            return None
        from .expert import shard_experts

        mesh = build_expert_mesh(self.degrees, self.device.type, sharded=sharded)
        modules = shard_experts(model, mesh, self.degrees, placed)
        return data.ExpertSharding(
            mesh, modules, data.fsdp_placement_arguments(model, placed, ())["shard_placement_fn"]
        )

    def _place(self, model: LanguageModel, config: ModelConfig) -> dict[str, dict[str, int | None]]:
        """Return the dims that are cut of each parameter of a model that is whole as yet.

        Raises:
            RecipeError: rules that the model's parameters cannot follow.
        """
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        refuse_misfits(shapes, config, self.table, self.degrees)
        found = locate(shapes, config, self.table, self.degrees)
        return {each.name: each.place for each in found}

    def _replicate_parameters(
        self, model: nn.Module, placed: Mapping[str, Mapping[str, int | None]], mesh: DeviceMesh
    ) -> set[str]:
        """Let every rank store what no axis cuts, where FSDP would cut it; return their names."""
        names = {name for name, _ in model.named_parameters() if placed[name]["shard"] is None}
        if names:
            from .tensor.local_views import replicate_parameters

            axes = ("replicate", "shard", "tensor")
            used = tuple(axis for axis in axes if axis == "shard" or mesh[axis].size() > 1)
            replicate_parameters(model, names, mesh[used])
        return names

    def parallelize(
        self,
        model: LanguageModel,
        parts: LocalParts,
        reduce: torch.dtype,
        *,
        seq_len: int,
        micro_batches: int,
    ) -> ParallelModel:
        """Wrap a split model for training, once its parameters are on the device.

        Args:
            model: the model that `split` was applied to.
            parts: what `split` returned.
            reduce: dtype of gradient reduction.
            seq_len: tokens per row of the data.
            micro_batches: micro batches of one optimizer step in a pipeline.
        """
        found = data.parallelize(model, self.table, self.degrees, self.device, reduce)
        if self.mesh is None:
            return found
        whole = [w for name, w in model.named_parameters() if name in parts.whole]
        kept = [w for name, w in model.named_parameters() if name in parts.kept]
        finish = [make_replicated_reduction(whole, kept, self.mesh, self.device)]
        if parts.cut is not None:
            from .pipeline.pipeline import Pipeline

            group, place = self.mesh.get_group("pipeline"), self.mesh.get_local_rank("pipeline")
            other = parts.cut.other_end(place)
            if other is not None:
                tied = tuple(model.get_submodule(parts.embed).parameters())
                finish.append(make_tied_reduction(other, tied, group, self.device))
                found = replace(found, duplicate_parameters=tied if other < place else ())
            table = self.table.pipelining
            length = seq_len // self.degrees.context // self.degrees.tensor
            pipeline = Pipeline(
                parts.stages,
                parts.cut,
                group,
                self.device,
                read_schedule(Path(table.csv)) if table.csv else table.schedule,
                micro_batches,
                torch.empty(1, length, parts.width, dtype=model.compute_dtype, device="meta"),
            )
            found = replace(found, pipeline=pipeline)
        return replace(found, post_backward_reductions=finish, manually_reduced={*whole, *kept})


@dataclass(frozen=True)
class LocalParts:
    """What this rank holds of a model.

    Attributes:
        whole: names of parameters that are replicated over the tensor axis, whose gradients must be
            summed over it.
        stages: this rank's pipeline stages by number.
        cut: how blocks are divided into stages; None without pipeline parallelism.
        width: size of the hidden states that stages send each other.
        kept: names of parameters that FSDP ignores, whose gradients must be averaged over the data
            axes.
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
