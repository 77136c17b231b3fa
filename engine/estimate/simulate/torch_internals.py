"""Where the tracker listens to torch: memory that no operation makes, and what memory is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.pipelining import stage
from torch.distributed.tensor._sharding_prop import ShardingPropagator

if TYPE_CHECKING:
    from .tracker import MemoryTracker


Replaced = tuple[Any, str, Any]
"""an object, its attribute, and what takes its place"""


def watched(tracker: MemoryTracker) -> Iterator[Replaced]:
    """Yield what replaces torch's own functions while a tracker counts."""
    from .tracker import COMMUNICATION, GRADIENTS, RECEIVED

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        found = resize(storage, size)
        tracker.resized(storage)
        return found

    yield torch.UntypedStorage, "resize_", resized
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_uncounted(*args: Any) -> Any:
        # It computes on tensors of global shape, which nothing ever holds.
        with tracker.paused():
            return propagate(*args)

    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted
    for module, name, kind in (
        (_fsdp_param_group, "foreach_all_gather", COMMUNICATION),
        (_fsdp_param_group, "foreach_reduce", COMMUNICATION),
        (stage, "_make_tensor_from_meta", RECEIVED),
    ):
        yield module, name, tracker.forcing(kind, getattr(module, name))
    keep = FSDPParam.to_accumulated_grad_if_needed

    def keep_gradient(parameter: FSDPParam) -> None:
        # Of a micro batch that is not the last: whole, and kept until the reduction.
        keep(parameter)
        kept = parameter.unsharded_accumulated_grad
        if kept is None and hasattr(parameter, "_unsharded_param"):
            kept = parameter.unsharded_param.grad
        if kept is not None:
            tracker.add([kept], GRADIENTS)

    yield FSDPParam, "to_accumulated_grad_if_needed", keep_gradient
