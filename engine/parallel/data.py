"""Data parallelism: nothing for one process, DDP for replicas, FSDP2 for shards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..recipe.tables import Parallel
from .mesh import Degrees

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from ...model_zoo.language_model import LanguageModel
    from ...model_zoo.layout import Layout
    from .pipeline import Pipeline

# Strategies that keep the gathered weights between forward and backward (ZeRO-2).
KEEPS_WEIGHTS = {"shard_grad_op", "hybrid_shard_zero2"}


@dataclass(frozen=True)
class Parallelized:
    """A model that runs on all ranks as one would on one.

    Args:
        model: the bare module: parameter names, evaluation, state.
        forward: what a training step calls.
        reduce_gradients: True before the last backward of a step, False before the others.
        finish_gradients: called after the last backward of a step.
        pipeline: runs forward and backward, where ranks hold some of the blocks each.
    """

    model: LanguageModel
    forward: Callable[..., Tensor]
    reduce_gradients: Callable[[bool], None]
    finish_gradients: Callable[[], None] = lambda: None
    pipeline: Pipeline | None = None


def is_sharded(table: Parallel, degrees: Degrees) -> bool:
    """Return whether the plan splits parameters over the ranks that see different samples."""
    ranks = degrees.shard * degrees.context
    return table.fsdp.strategy != "no_shard" and (ranks > 1 or table.fsdp.offload)


def uses_fsdp(table: Parallel, degrees: Degrees) -> bool:
    """Return whether FSDP2 reduces the gradients.

    It does so also for mere replicas of weights that tensor parallelism has split, and of a
    pipeline's stages: DDP does not know them.
    """
    also = degrees.copies > 1 and (degrees.tensor > 1 or degrees.pipeline > 1)
    return is_sharded(table, degrees) or also


def shard(
    model: LanguageModel,
    layout: Layout,
    table: Parallel,
    mesh: DeviceMesh,
    device: torch.device,
    compute: torch.dtype,
    reduce: torch.dtype,
    stages: Collection[nn.Module] = (),
) -> None:
    """Split the parameters of a model (still on `meta`) over the shard axis, in place.

    Each block is one unit, so is the head unless its weight is the embedding's; the rest is the
    root's. With `replicate` above 1 this is HSDP.

    Args:
        mesh: see `build_mesh`.
        stages: of a pipeline, in place of the whole model.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp import fully_shard as fully

    replicated = mesh["replicate"].size() > 1
    pinned = device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if table.fsdp.offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False
    )
    # A pipeline would gather them again for each micro batch.
    keep = table.fsdp.strategy in KEEPS_WEIGHTS or bool(stages)

    def wrap(module: nn.Module, reshard: bool) -> None:
        fully(
            module,
            mesh=mesh["replicate", "shard"] if replicated else mesh["shard"],
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
        )

    for block in cast(nn.ModuleList, model.get_submodule(layout.blocks)):
        wrap(block, reshard=not keep)
    if stages:
        modules = dict(model.named_modules())
        for end in {layout.embed, layout.head} & modules.keys():
            wrap(modules[end], reshard=False)
        for stage in stages:
            wrap(stage, reshard=False)
        return
    head = model.get_submodule(layout.head)
    embedding = set(model.get_submodule(layout.embed).parameters())
    if embedding.isdisjoint(head.parameters()):
        # Backward needs the head at once: freeing it after forward would only gather it again.
        wrap(head, reshard=False)
    wrap(model, reshard=False)


def parallelize(
    model: LanguageModel, by_fsdp: bool, degrees: Degrees, device: torch.device, reduce: torch.dtype
) -> Parallelized:
    """Return the model ready for training, its parameters in place on `device`."""
    if by_fsdp:
        fsdp = cast("FSDPModule", model)

        def synchronize(last: bool) -> None:
            fsdp.set_requires_gradient_sync(last)
            fsdp.set_is_last_backward(last)

        return Parallelized(model, model, synchronize)
    if degrees.copies > 1:
        return _replicate(model, device, reduce)
    return Parallelized(model, model, lambda last: None)


def _replicate(model: LanguageModel, device: torch.device, reduce: torch.dtype) -> Parallelized:
    from torch.nn.parallel import DistributedDataParallel

    ddp = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        init_sync=False,  # the initial values are the same on each rank by construction
    )
    if reduce is torch.bfloat16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        ddp.register_comm_hook(None, bf16_compress_hook)

    def synchronize(last: bool) -> None:
        ddp.require_backward_grad_sync = last

    return Parallelized(model, ddp, synchronize)
