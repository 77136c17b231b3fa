"""Replaces functions of PyTorch while a step is simulated, tracked or traced.

Every name that is replaced is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules, stage

from ....kernels.torch_private import (
    FakeStore,
    PipelineSchedule,
    ShardingPropagator,
    fsdp_param_group,
)


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class until the context ends."""
    missing = object()
    original = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is missing:  # it was inherited
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def watch_memory(
    resized: Callable[[torch.UntypedStorage], None],
    paused: Callable[[], AbstractContextManager[None]],
    communicates: Callable[[], AbstractContextManager[None]],
    receives: Callable[[], AbstractContextManager[None]],
    keeps_gradient: Callable[[Tensor], None],
) -> Iterator[None]:
    """Report memory that no operation shows, and what memory is for.

    Args:
        resized: called with each storage after `resize_`, by which FSDP allocates and frees the
            weights that it gathers.
        paused: a context around operations whose results are never held: the propagation of
            DTensor placements computes on tensors of global shape.
        communicates: a context around the collectives of FSDP.
        receives: a context around the allocation of a pipeline's receive buffers.
        keeps_gradient: called with the unsharded gradient that FSDP keeps between micro batches.
    """
    resize = torch.UntypedStorage.resize_
    finish_backward = fsdp_param_group.FSDPParamGroup.post_backward

    def resize_and_report(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    def finish_and_report(group: Any, *unused: Any) -> None:
        finish_backward(group, *unused)
        for parameter in group.fsdp_params:
            gradient = parameter.unsharded_accumulated_grad
            if gradient is None and hasattr(parameter, "_unsharded_param"):
                gradient = parameter.unsharded_param.grad
            if gradient is not None:
                keeps_gradient(gradient)

    with ExitStack() as stack:
        replacements: list[tuple[Any, str, Any]] = [
            (torch.UntypedStorage, "resize_", resize_and_report),
            (fsdp_param_group.FSDPParamGroup, "post_backward", finish_and_report),
            *(
                (owner, name, _run_in(context, getattr(owner, name)))
                for owner, name, context in (
                    (ShardingPropagator, "_propagate_tensor_meta_non_cached", paused),
                    (fsdp_param_group, "foreach_all_gather", communicates),
                    (fsdp_param_group, "foreach_reduce", communicates),
                    (stage, "_make_tensor_from_meta", receives),
                )
            ),
        ]
        for replacement in replacements:
            stack.enter_context(replace_attribute(*replacement))
        yield


def _run_in(
    context: Callable[[], AbstractContextManager[None]], function: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return run


@contextmanager
def fake_process_group(rank: int, ranks: int) -> Iterator[None]:
    """Make this process one of several ranks of which no other exists: collectives return at once.

    Nothing changes with one rank, or where a process group exists already.
    """
    if ranks == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with _skip_shape_handshake():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _skip_shape_handshake() -> Iterator[None]:
    """Let pipelines know the shapes that ranks exchange without asking the other ranks.

    1F1B also accepts fewer micro batches than stages, which is how many the last stages hold.
    """
    unchecked = schedules.PipelineScheduleSingle.__init__
    with ExitStack() as stack:
        stack.enter_context(replace_attribute(schedules.Schedule1F1B, "__init__", unchecked))
        # Before PyTorch 2.13 ranks do not vote on whether all of them know the shapes.
        if modes := getattr(stage, "InferenceMode", None):

            def know_shapes(_: Any, stages: list[Any], *_rest: Any) -> None:
                for each in stages:
                    each._inference_mode = modes.STATIC

            owner = PipelineSchedule
            stack.enter_context(replace_attribute(owner, "_warmup_p2p", know_shapes))
        yield
