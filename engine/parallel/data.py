"""Data parallelism: nothing for one process, DDP for replicas, FSDP2 for shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .blocks import hooks_outside
from .mesh import Degrees, uses_fsdp
from .tables import Parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from ...model_zoo.language_model import LanguageModel
    from ...model_zoo.layout import Layout
    from .pipeline.pipeline import Pipeline, Stage

# Strategies that keep the gathered weights between forward and backward (ZeRO-2).
KEEPS_WEIGHTS = {"shard_grad_op", "hybrid_shard_zero2"}


@dataclass(frozen=True)
class ParallelModel:
    """A model wrapped for distributed training, with the hooks that a training step needs.

    Attributes:
        model: the unwrapped module. Parameter names, state dicts and evaluation use it.
        forward: the wrapped forward pass: of DDP, of FSDP2, or of the module itself.
        set_gradient_sync: called with True before the backward pass of the last micro batch and
            with False before the others, so that gradients are reduced once per step.
        post_backward_reductions: called in order after the last backward pass, for gradients that
            neither DDP nor FSDP reduces (tied embeddings, parameters replicated over the tensor
            axis).
        manually_reduced: the parameters whose gradients are final only after these reductions.
        pipeline: runs the forward and backward passes of a model that is split into pipeline
            stages; None without pipeline parallelism.
        duplicate_parameters: parameters of which another rank owns the canonical copy, such as a
            tied embedding on the last stage. Gradient norms and exports leave them out.
        owns_gradient_buffers: whether the wrapper uses gradient memory again in the next step (DDP
            buckets), so that gradients are zeroed in place instead of being set to None.
    """

    model: LanguageModel
    forward: Callable[..., Tensor]
    set_gradient_sync: Callable[[bool], None]
    post_backward_reductions: Sequence[Callable[[], None]] = ()
    manually_reduced: Collection[nn.Parameter] = ()
    pipeline: Pipeline | None = None
    duplicate_parameters: tuple[nn.Parameter, ...] = ()
    owns_gradient_buffers: bool = False


@dataclass(frozen=True)
class ExpertSharding:
    """The modules of experts, which FSDP shards over a mesh of their own.

    Attributes:
        mesh: the mesh that `build_expert_mesh` returned.
        modules: each becomes an FSDP unit.
        placement: maps a parameter to its placement on the shard axis.
    """

    mesh: DeviceMesh
    modules: Sequence[nn.Module]
    placement: Callable[[nn.Parameter], Any]


def fsdp_placement_arguments(
    model: nn.Module, placed: Mapping[str, Mapping[str, int | None]], kept: Collection[str]
) -> dict[str, Any]:
    """Build the keyword arguments that make `fully_shard` follow the recipe's partition rules.

    Args:
        model: the model on the meta device, before it is sharded.
        placed: for each parameter name, the tensor dimension that the axis "shard" splits.
        kept: names of parameters that FSDP ignores, because every rank stores them whole.
    """
    from torch.distributed.tensor import Shard

    weights = dict(model.named_parameters())
    dims = {weight: placed[name]["shard"] or 0 for name, weight in weights.items()}
    return {
        "shard_placement_fn": lambda weight: Shard(dims[weight]),
        "ignored_params": {weights[name] for name in kept},
    }


def apply_fsdp(
    model: LanguageModel,
    layout: Layout,
    table: Parallel,
    mesh: DeviceMesh,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
    stages: Collection[Stage] = (),
    placement_arguments: Mapping[str, Any] | None = None,
    experts: ExpertSharding | None = None,
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
        placement_arguments: what `fsdp_placement_arguments` returned; default: dimension 0 of every
            parameter is split.
        experts: modules that are sharded over a mesh of their own.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp import fully_shard as fully

    pinned = device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if table.fsdp.offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    # A pipeline would otherwise gather the parameters again for each micro batch.
    keep = table.fsdp.strategy in KEEPS_WEIGHTS or bool(stages)

    def wrap(
        module: nn.Module, reshard: bool, mesh: DeviceMesh = mesh, **placement_arguments: Any
    ) -> None:
        fully(
            module,
            mesh=mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"],
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
            **placement_arguments,
        )

    if experts:
        for module in experts.modules:
            wrap(module, not keep, experts.mesh, shard_placement_fn=experts.placement)
            hooks_outside(module)
    placement_arguments = placement_arguments or {}
    blocks = list(cast("nn.ModuleList", model.get_submodule(layout.blocks)))
    for block in blocks:
        wrap(block, not keep, **placement_arguments)
    if stages:
        modules = dict(model.named_modules())
        for end in {layout.embed, layout.head} & modules.keys():
            wrap(modules[end], False, **placement_arguments)
        for stage in stages:
            wrap(stage, False, **placement_arguments)
            _prefetch(stage, [part for part in blocks if part in stage.parts], table.fsdp.prefetch)
        return
    head = model.get_submodule(layout.head)
    embedding = set(model.get_submodule(layout.embed).parameters())
    units = blocks
    if embedding.isdisjoint(head.parameters()):
        # Backward needs the head at once: freeing it after forward would only gather it again.
        wrap(head, False, **placement_arguments)
        units = [*blocks, head]
    wrap(model, False, **placement_arguments)
    _prefetch(model, units, table.fsdp.prefetch)


def _prefetch(root: nn.Module, units: Sequence[nn.Module], depth: int) -> None:
    """Let each unit prefetch the parameters of the next `depth` ones; 0: as PyTorch does."""
    if not depth:
        return
    wrapped = cast("list[FSDPModule]", units)
    cast("FSDPModule", root).set_modules_to_forward_prefetch(wrapped[:depth])
    for number, unit in enumerate(wrapped):
        unit.set_modules_to_forward_prefetch(wrapped[number + 1 : number + 1 + depth])
        unit.set_modules_to_backward_prefetch(wrapped[max(0, number - depth) : number][::-1])


def parallelize(
    model: LanguageModel,
    table: Parallel,
    degrees: Degrees,
    device: torch.device,
    reduce: torch.dtype,
) -> ParallelModel:
    """Wrap a model whose parameters are on `device` for data parallelism: FSDP2, DDP or nothing."""
    if uses_fsdp(table, degrees):
        fsdp = cast("FSDPModule", model)
        always = table.fsdp.reduce_every == "micro_batch"

        def synchronize(last: bool) -> None:
            fsdp.set_requires_gradient_sync(last or always)
            fsdp.set_requires_all_reduce(last)
            fsdp.set_is_last_backward(last or always)

        return ParallelModel(model, model, synchronize)
    if degrees.dp_cp > 1:
        return _replicate(model, device, reduce)
    return ParallelModel(model, model, lambda last: None)


def _replicate(model: LanguageModel, device: torch.device, reduce: torch.dtype) -> ParallelModel:
    from torch.nn.parallel import DistributedDataParallel

    # Torch 2.13 gave it another name, and warns of the old one.
    names = {"broadcast_buffers", "forward_sync_buffers"}
    known = names & signature(DistributedDataParallel).parameters.keys()
    options: dict[str, Any] = {max(known): False}
    ddp = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        **options,
        gradient_as_bucket_view=True,
        init_sync=False,  # the initial values are the same on each rank by construction
    )
    if reduce is torch.bfloat16:
        ddp.register_comm_hook(None, _average_in_bf16)

    def synchronize(last: bool) -> None:
        ddp.require_backward_grad_sync = last

    return ParallelModel(model, ddp, synchronize, owns_gradient_buffers=True)


# Torch looks at the annotations of a hook, and takes none that are texts.
def _average_in_bf16(_, bucket):  # type: ignore[no-untyped-def]
    """Average gradients over ranks; torch's own hook for it takes no CPU tensors."""
    gradients = bucket.buffer()
    sent = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = cast("dist.Work", dist.all_reduce(sent, async_op=True))
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))
