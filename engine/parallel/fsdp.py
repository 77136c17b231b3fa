"""FSDP2: parameters, gradients and optimizer state are sharded over ranks that compute different
tokens. Where the replicate axis has more than one rank, this is HSDP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.layout import Layout
from ..core.errors import Problem, RecipeError
from .axis import AxisParts, LocalParts, LocalRank, ParallelModel, SplitSettings, StepSettings
from .blocks import hide_hooks_from_checkpointing
from .expert import build_expert_mesh, shard_experts
from .gradient_reduction import make_replicated_reduction
from .tables import Parallel
from .tensor.local_views import replicate_parameters

if TYPE_CHECKING:
    from .pipeline.stage import Stage


@dataclass(frozen=True)
class ShardedParts(AxisParts):
    """Shards this rank's part of a model with FSDP2, and its experts over a mesh of their own.

    Where the strategy shards nothing, FSDP2 only reduces gradients over replicas.

    Attributes:
        local: this rank.
        mesh: the mesh that `build_mesh` returned.
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
        """Shard parameters, except those that a rule or `ignored` keeps whole.

        Raises:
            RecipeError: a parameter is a scalar.
        """
        local, dims = self.local, settings.dims
        if scalars := [name for name, weight in model.named_parameters() if not weight.ndim]:
            message = f"FSDP cannot shard {scalars[0]}, which is a scalar"
            hint = "give it the shape [1], or replicate: parallel.shard = 1"
            raise RecipeError([Problem(message, "parallel.shard", hint=hint)])
        experts = None
        is_sharded = local.table.is_sharded(local.degrees)
        if local.degrees.expert_ranks > 1:
            mesh = build_expert_mesh(local.degrees, local.device.type, sharded=is_sharded)
            modules = shard_experts(model, mesh, local, dims)
            experts = ExpertSharding(mesh, modules, _placement_function(model, dims))
        ignored = set[str]()
        if is_sharded:
            ignored = {name for name, _ in model.named_parameters() if dims[name]["shard"] is None}
            self._replicate(model, ignored, dims)
        arguments: dict[str, Any] = {}
        if local.table.rules or ignored:
            weights = dict(model.named_parameters())
            arguments["shard_placement_fn"] = _placement_function(model, dims)
            arguments["ignored_params"] = {weights[name] for name in ignored}
        apply_fsdp(
            model,
            config.layout,
            local.table,
            self.mesh,
            local.device,
            settings.compute,
            settings.reduce,
            parts.stages.values(),
            arguments,
            experts,
            config.frozen_prefixes,
        )
        return replace(parts, fsdp_ignored=ignored)

    def _replicate(
        self, model: nn.Module, names: set[str], dims: Mapping[str, Mapping[str, int | None]]
    ) -> None:
        """Let every rank store the named parameters as the tensor axis leaves them."""
        if names:
            # The axes of FSDP's own DTensors: torch 2.13 has no operations across meshes.
            axes = ("replicate", "shard", "tensor")
            used = tuple(axis for axis in axes if axis == "shard" or self.mesh[axis].size() > 1)
            tensor_dims = {name: dims[name]["tensor"] for name in names}
            replicate_parameters(model, tensor_dims, self.mesh[used])

    def wrap(
        self, wrapped: ParallelModel, parts: LocalParts, settings: StepSettings
    ) -> ParallelModel:
        """Let a step say when FSDP reduces gradients, and average those of ignored parameters."""
        fsdp = cast("FSDPModule", wrapped.model)
        always = self.local.table.fsdp.reduce_every == "micro_batch"
        units = [unit for unit in wrapped.model.modules() if isinstance(unit, FSDPModule)]
        frozen = [unit for unit in units if not any(w.requires_grad for w in unit.parameters())]

        def synchronize(last: bool) -> None:
            # Without the sync FSDP holds whole gradients until the last micro batch. With `always`
            # each micro batch is reduce-scattered; HSDP's all-reduce still runs once a step.
            fsdp.set_requires_gradient_sync(last or always)
            # Of a unit that never runs FSDP (torch 2.13) cannot hold gradients back.
            for unit in frozen:
                unit.set_requires_gradient_sync(True)
            fsdp.set_requires_all_reduce(last)
            fsdp.set_is_last_backward(last or always)

        named = wrapped.model.named_parameters()
        ignored = [weight for name, weight in named if name in parts.fsdp_ignored]
        # The mean over one axis and then over the other is the mean over both, groups being equal.
        groups = [
            self.mesh.get_group(axis)
            for axis in ("shard", "replicate")
            if self.mesh[axis].size() > 1
        ]
        average = make_replicated_reduction(
            ignored, dist.ReduceOp.AVG, groups if ignored else [], self.local.device
        )
        return replace(
            wrapped,
            set_gradient_sync=synchronize,
            gradient_divisor=self.local.degrees.dp_cp,
            post_backward_reductions=[average],
            manually_reduced=ignored,
        )


def make_axis(local: LocalRank) -> ShardedParts:
    """Return what FSDP does on this rank."""
    assert local.mesh is not None, "a plan that uses FSDP has a mesh"
    return ShardedParts(local, local.mesh)


@dataclass(frozen=True)
class ExpertSharding:
    """The modules of experts, which FSDP shards over a mesh of their own.

    Attributes:
        mesh: the mesh that `build_expert_mesh` returned.
        modules: the modules of experts, each of which becomes an FSDP unit.
        placement: maps a parameter to the parameter's placement on the shard axis.
    """

    mesh: DeviceMesh
    modules: Sequence[nn.Module]
    placement: Callable[[nn.Parameter], Shard]


def _placement_function(
    model: nn.Module, dims: Mapping[str, Mapping[str, int | None]]
) -> Callable[[nn.Parameter], Shard]:
    """Return the function that tells `fully_shard` which dimension of a parameter to split.

    Args:
        model: the model on the meta device, before it is sharded.
        dims: for each parameter name, the tensor dimension that the axis "shard" splits.
    """
    by_parameter = {weight: dims[name]["shard"] or 0 for name, weight in model.named_parameters()}
    return lambda parameter: Shard(by_parameter[parameter])


def apply_fsdp(
    model: Model,
    layout: Layout,
    table: Parallel,
    mesh: DeviceMesh,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
    stages: Collection[Stage] = (),
    placement_arguments: Mapping[str, Any] | None = None,
    experts: ExpertSharding | None = None,
    frozen_prefixes: Sequence[str] = (),
) -> None:
    """Apply FSDP2 to a model on the meta device, in place; HSDP if the replicate axis is above 1.

    Each block is an FSDP unit, and so is the head unless it is tied to the embedding. The root unit
    has the remaining parameters.

    Args:
        model: the model, or this rank's part of it.
        layout: names of its embedding, blocks and head.
        table: the recipe's `[parallel]`.
        mesh: the mesh that `build_mesh` returned.
        device: the device of this rank.
        compute: dtype of gathered parameters.
        reduce: dtype of gradient reduction.
        stages: this rank's pipeline stages, which become the root units.
        placement_arguments: further arguments of `fully_shard`; default: dimension 0 of every
            parameter is split.
        experts: modules that are sharded over a mesh of their own.
        frozen_prefixes: what the names of parameters of blocks that never run begin with.
    """
    # torch 2.13 cannot pin host memory without an accelerator, and pins by default.
    pinned = device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if table.fsdp.offload else OffloadPolicy()
    # Inputs keep their dtype: blocks also take fp32 rotary tables and fp64 token weights, which
    # FSDP would round to the compute dtype.
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    # A pipeline would otherwise gather the parameters again for each micro batch.
    reshard_blocks = not stages and table.fsdp.resharding(mesh["shard"].size())

    def wrap(
        module: nn.Module, reshard: bool | int, mesh: DeviceMesh = mesh, **placement_arguments: Any
    ) -> None:
        fully_shard(
            module,
            mesh=mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"],
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
            **placement_arguments,
        )

    if experts:
        # Before their blocks: FSDP2 leaves out what an inner unit holds already.
        for module in experts.modules:
            wrap(module, reshard_blocks, experts.mesh, shard_placement_fn=experts.placement)
            hide_hooks_from_checkpointing(module)
    placement_arguments = placement_arguments or {}
    blocks = layout.find_blocks(model)
    for block in blocks:
        wrap(block, reshard_blocks, **placement_arguments)
    # Each stage is a root of its own, because schedules run and reduce stages one by one.
    if stages:
        modules = dict(model.named_modules())
        for end in {layout.embed, layout.head} & modules.keys():
            wrap(modules[end], False, **placement_arguments)
        for stage in stages:
            wrap(stage, False, **placement_arguments)
            _prefetch(stage, [part for part in blocks if part in stage.parts], table.fsdp.prefetch)
        return
    # The path of an end that the layout does not name is empty, which is the whole model: the two
    # then share parameters, and the head is no unit.
    head = model.get_submodule(layout.head)
    embedding = set(model.get_submodule(layout.embed).parameters())
    # A block that never runs would stay gathered if another one prefetched it.
    idle = {model.get_submodule(prefix.removesuffix(".")) for prefix in frozen_prefixes}
    units = [block for block in blocks if block not in idle]
    if embedding.isdisjoint(head.parameters()):
        # Backward needs the head at once: freeing it after forward would only gather it again.
        wrap(head, False, **placement_arguments)
        units.append(head)
    wrap(model, False, **placement_arguments)
    _prefetch(model, units, table.fsdp.prefetch)


def _prefetch(root: nn.Module, units: Sequence[nn.Module], depth: int) -> None:
    """Let each unit prefetch the parameters of the next `depth` units, in the backward pass too.

    Args:
        root: the root unit.
        units: the units in the order of the forward pass.
        depth: number of units; 0 keeps PyTorch's own prefetching.
    """
    if not depth:
        return
    wrapped = cast("list[FSDPModule]", units)
    cast("FSDPModule", root).set_modules_to_forward_prefetch(wrapped[:depth])
    for number, unit in enumerate(wrapped):
        unit.set_modules_to_forward_prefetch(wrapped[number + 1 : number + 1 + depth])
        unit.set_modules_to_backward_prefetch(wrapped[max(0, number - depth) : number][::-1])
