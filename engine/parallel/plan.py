"""The parallelism plan: which ranks hold and compute which part of a model."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ..data.batch import Batch
from .axis import (
    AxisParts,
    LocalParts,
    LocalRank,
    ParallelModel,
    Sharing,
    SplitSettings,
    StepSettings,
)
from .mesh import AXES, MESH, Degrees
from .pipeline.cut import EndCosts, splits_backward
from .placement import placements_for, require_aligned, require_divisible
from .tables import Parallel

if TYPE_CHECKING:
    from ...kernels.choose import Kernels

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan(LocalRank):
    """The parallelism plan of a run, from the view of one rank.

    Attributes:
        axes: what each axis of more than one rank does, and then FSDP or DDP.
    """

    axes: tuple[AxisParts, ...] = ()

    @property
    def data_rank(self) -> int:
        """Which of the ranks that read different samples this is."""
        return self.degrees.data_rank(self.rank)

    @property
    def measures_cut(self) -> bool:
        """Whether a pipeline's stages are balanced by measurement."""
        return self.degrees.pipeline > 1 and self.table.pipelining.cost == "measured"

    @property
    def sharing(self) -> Sharing:
        """What compiled and recomputed blocks need to know of the plan."""
        degrees, has_stages = self.degrees, self.degrees.pipeline > 1
        return Sharing(
            splits_weights=degrees.tensor > 1,
            shares_experts=degrees.expert_ranks > 1,
            splits_backward=has_stages and splits_backward(self.table.pipelining),
        )

    def kernels(self, kernels: Kernels, config: ModelConfig) -> Kernels:
        """Return kernels that compute this rank's part of attention and loss."""
        for axis in self.axes:
            kernels = axis.adapt_kernels(kernels, config)
        return kernels

    def take(self, batch: Batch, model: Model) -> Batch:
        """Return what this rank computes of rows that its group reads, as its model takes them."""
        # Only routers read the mask: without experts it need not be split and copied to the device.
        if not model.takes_padding:
            batch = batch.without_padding()
        # Flash attention, which needs no mask then, is for GPUs and 16 bits.
        is_half = model.compute_dtype in (torch.float16, torch.bfloat16)
        if self.device.type == "cuda" and is_half and model.takes_max_documents:
            batch = batch.count_documents()
        for axis in self.axes:
            batch = axis.take(batch)
        return batch

    def split(
        self,
        model: Model,
        config: ModelConfig,
        compute: torch.dtype,
        reduce: torch.dtype,
        costs: EndCosts | None = None,
        float8_layers: Collection[str] = (),
    ) -> LocalParts:
        """Split a model on the meta device over ranks, in place; parameters keep their names.

        Args:
            model: the whole model.
            config: the model's config.
            compute: dtype of gathered parameters.
            reduce: dtype of gradient reduction.
            costs: measured costs by which pipeline stages are balanced; None: estimated ones.
            float8_layers: paths of the layers for which tensor ranks gather the sequence in float8.

        Raises:
            RecipeError: rules that the model's parameters cannot follow.
        """
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        require_divisible(shapes, config, self.table, self.degrees)
        found = placements_for(shapes, config, self.table, self.degrees)
        require_aligned(found, self.degrees)
        dims = {each.name: each.place for each in found}
        settings = SplitSettings(dims, compute, reduce, costs, float8_layers)
        parts = LocalParts(config.layout.embed)
        for axis in self.axes:
            # In this order: prune, then split matrices, then shard what is left.
            parts = axis.split(model, config, parts, settings)
        return parts

    def parallelize(
        self,
        model: Model,
        parts: LocalParts,
        reduce: torch.dtype,
        *,
        num_positions: int,
        micro_batches: int,
    ) -> ParallelModel:
        """Wrap a split model for training, once its parameters are on the device.

        Args:
            model: the model that `split` was applied to.
            parts: what `split` returned.
            reduce: dtype of gradient reduction.
            num_positions: positions of a row of the data, over all ranks.
            micro_batches: micro batches of one optimizer step in a pipeline.
        """
        wrapped = ParallelModel(model, model)
        for axis in reversed(self.axes):
            wrapped = axis.wrap(wrapped, parts, StepSettings(reduce, num_positions, micro_batches))
        return wrapped


def make_plan(
    table: Parallel, rank: int, ranks: int, device: torch.device, *, is_simulated: bool = False
) -> Plan:
    """Return a rank's plan; all ranks call it.

    Args:
        table: the recipe's `[parallel]`.
        rank: global rank.
        ranks: the world size.
        device: the device of this rank.
        is_simulated: the other ranks do not exist and tensors have no content.

    Raises:
        RecipeError: the degrees do not multiply to the number of ranks.
    """
    degrees = table.degrees.resolve(ranks)
    if table.context_exchange == "ring" and degrees.context == 1 and rank == 0:
        log.warning('parallel.context_exchange = "ring" has no effect: parallel.context is 1')
    # A mesh creates process groups, and DDP needs none: it reduces over all ranks of the run.
    mesh, sharded = None, table.is_sharded(degrees)
    if sharded or degrees.model * degrees.expert_ranks > 1:
        mesh = build_mesh(degrees, device.type, sharded=sharded)
    local = LocalRank(table, degrees, rank, device, mesh, is_simulated)
    # Modules are imported where they are used: torch's pipelining and FSDP take a second to load.
    modules = [axis.implementation for axis in MESH if getattr(degrees, axis.name) > 1]
    # A simulation has no DDP: `estimate` adds the all-reduces of its buckets by a formula.
    if table.uses_fsdp(degrees):
        modules.append("fsdp")
    elif degrees.dp_cp > 1 and not is_simulated:
        modules.append("gradient_reduction")
    axes = [import_module(f".{name}", __package__).make_axis(local) for name in modules if name]
    return Plan(table, degrees, rank, device, mesh, is_simulated, tuple(axes))


def build_mesh(degrees: Degrees, device_type: str, *, sharded: bool) -> DeviceMesh:
    """Return the mesh on which parameters are placed; all ranks call it.

    Its axes are `pipeline`, `replicate`, `shard` and `tensor`. Ranks along the context axis hold
    the same weights, so weights are sharded over them too. Where nothing is sharded, all of these
    ranks are replicas.
    """
    shard = degrees.fsdp if sharded else 1
    sizes = {axis.name: getattr(degrees, axis.name) for axis in MESH if not axis.reduces_gradients}
    # Axes of one rank stay in the mesh, so that placements can always name them.
    sizes |= {"replicate": degrees.dp_cp // shard, "shard": shard}
    names = tuple(axis for axis in AXES if axis in sizes)
    return init_device_mesh(device_type, tuple(sizes[axis] for axis in names), mesh_dim_names=names)
