"""Data parallelism: nothing for one process, DDP for replicas, FSDP2 for shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
class Parallelized:
    """A model that runs on all ranks as one would on one.

    Args:
        model: the bare module: parameter names, evaluation, state.
        forward: what a training step calls.
        reduce_gradients: True before the last backward of a step, False before the others.
        finish_gradients: called, in order, after the last backward of a step.
        late: weights whose gradients are complete only then.
        pipeline: runs forward and backward, where ranks hold some of the blocks each.
        counted_elsewhere: weights of which another rank holds a copy that counts and is exported.
        keeps_gradients: their memory belongs to who reduces them, and is used again.
    """

    model: LanguageModel
    forward: Callable[..., Tensor]
    reduce_gradients: Callable[[bool], None]
    finish_gradients: Sequence[Callable[[], None]] = ()
    late: Collection[nn.Parameter] = ()
    pipeline: Pipeline | None = None
    counted_elsewhere: tuple[nn.Parameter, ...] = ()
    keeps_gradients: bool = False


@dataclass(frozen=True)
class Experts:
    """Modules that are sharded over ranks of their own.

    Attributes:
        mesh: see `build_expert_mesh`.
        modules: each a unit.
        placement: of a weight, along the shard axis.
    """

    mesh: DeviceMesh
    modules: Sequence[nn.Module]
    placement: Callable[[nn.Parameter], Any]


def placing(
    model: nn.Module, placed: Mapping[str, Mapping[str, int | None]], kept: Collection[str]
) -> dict[str, Any]:
    """Return arguments of `fully_shard` that cut parameters where rules say.

    Args:
        model: still whole along the shard axis.
        placed: parameter name -> "shard" -> the dim to cut.
        kept: names of what is to be ignored.
    """
    from torch.distributed.tensor import Shard

    weights = dict(model.named_parameters())
    dims = {weight: placed[name]["shard"] or 0 for name, weight in weights.items()}
    return {
        "shard_placement_fn": lambda weight: Shard(dims[weight]),
        "ignored_params": {weights[name] for name in kept},
    }


def shard(
    model: LanguageModel,
    layout: Layout,
    table: Parallel,
    mesh: DeviceMesh,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
    stages: Collection[Stage] = (),
    placing: Mapping[str, Any] | None = None,
    experts: Experts | None = None,
) -> None:
    """Split the parameters of a model (still on `meta`) over the shard axis, in place.

    Each block is one unit, so is the head unless its weight is the embedding's; the rest is the
    root's. With `replicate` above 1 this is HSDP.

    Args:
        mesh: see `build_mesh`.
        stages: of a pipeline, in place of the whole model.
        placing: see there; default: dim 0 of all is cut.
        experts: modules with a mesh of their own.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp import fully_shard as fully

    pinned = device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if table.fsdp.offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    # A pipeline would gather them again for each micro batch.
    keep = table.fsdp.strategy in KEEPS_WEIGHTS or bool(stages)

    def wrap(module: nn.Module, reshard: bool, mesh: DeviceMesh = mesh, **placing: Any) -> None:
        fully(
            module,
            mesh=mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"],
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
            **placing,
        )

    if experts:
        from .recompute import hooks_outside

        for module in experts.modules:
            wrap(module, not keep, experts.mesh, shard_placement_fn=experts.placement)
            hooks_outside(module)
    placing = placing or {}
    blocks = list(cast(nn.ModuleList, model.get_submodule(layout.blocks)))
    for block in blocks:
        wrap(block, not keep, **placing)
    if stages:
        modules = dict(model.named_modules())
        for end in {layout.embed, layout.head} & modules.keys():
            wrap(modules[end], False, **placing)
        for stage in stages:
            wrap(stage, False, **placing)
            _prefetch(stage, [part for part in blocks if part in stage.parts], table.fsdp.prefetch)
        return
    head = model.get_submodule(layout.head)
    embedding = set(model.get_submodule(layout.embed).parameters())
    units = blocks
    if embedding.isdisjoint(head.parameters()):
        # Backward needs the head at once: freeing it after forward would only gather it again.
        wrap(head, False, **placing)
        units = [*blocks, head]
    wrap(model, False, **placing)
    _prefetch(model, units, table.fsdp.prefetch)


def _prefetch(root: nn.Module, units: Sequence[nn.Module], depth: int) -> None:
    """Let each unit gather the weights of the next ones; 0 leaves it to torch."""
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
) -> Parallelized:
    """Return the model ready for training, its parameters in place on `device`."""
    if uses_fsdp(table, degrees):
        fsdp = cast("FSDPModule", model)
        always = table.fsdp.reduce_every == "micro_batch"

        def synchronize(last: bool) -> None:
            fsdp.set_requires_gradient_sync(last or always)
            fsdp.set_requires_all_reduce(last)
            fsdp.set_is_last_backward(last or always)

        return Parallelized(model, model, synchronize)
    if degrees.copies > 1:
        return _replicate(model, device, reduce)
    return Parallelized(model, model, lambda last: None)


def _replicate(model: LanguageModel, device: torch.device, reduce: torch.dtype) -> Parallelized:
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

    return Parallelized(model, ddp, synchronize, keeps_gradients=True)


# Torch looks at the annotations of a hook, and takes none that are texts.
def _average_in_bf16(_, bucket):  # type: ignore[no-untyped-def]
    """Average gradients over ranks; torch's own hook for it takes no CPU tensors."""
    gradients = bucket.buffer()
    sent = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = cast(dist.Work, dist.all_reduce(sent, async_op=True))
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))
