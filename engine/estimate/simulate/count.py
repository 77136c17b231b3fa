"""Counts the FLOPs and the collectives of one rank's step, real or simulated, by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from ....kernels.torch_private import (
    TorchDispatchMode,
    current_graph_task_id,
    top_saved_tensors_hooks,
)
from ...core.local import local
from ...data.batch import Batch
from .collectives import CollectiveMatcher, Route, named_arguments

if TYPE_CHECKING:
    from ...train.step import TrainStep


_GROUPED = ("aten::_grouped_mm", "trainer::grouped_mm", "trainer::grouped_dw")
"""grouped matmuls, one for each expert, which PyTorch's FLOP counter does not support"""
_IN_PLACE = {
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}
"""the supported out-of-place operation of each in-place matmul"""
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")


def count_flops(
    operation: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> Counter[str]:
    """Return the FLOPs of one operation under "model", or under "again" if they are recomputed.

    Matmuls use the formulas of `torch.utils.flop_counter`. That module's attention formula ignores
    causal masks, and its mode does not distinguish recomputation, so both are done here.
    """
    packet = operation.overloadpacket
    if operation._opname.startswith(_ATTENTION):
        scores, values = _attention_flops(named_arguments(operation, args, kwargs))
        if operation._opname.endswith(("backward", "backward_for_cpu")):
            # Fused kernels do not keep the scores: the backward pass recomputes them.
            return Counter(model=2 * (scores + values), again=scores)
        flops = scores + values
    elif operation.name().startswith(_GROUPED):
        flops = 2 * args[0].numel() * out.shape[-1]
    elif operation.name() == "trainer::write_wide_product":
        flops = 2 * args[1].numel() * args[2].shape[-1]
    elif packet is torch.ops.aten.linalg_qr:
        # Householder's method, and then Q (Golub and Van Loan, Matrix Computations, 5.2), of
        # square matrices.
        flops = 8 * args[0].numel() * args[0].shape[-1] // 3
    elif formula := flop_registry.get(_IN_PLACE.get(packet, packet)):
        flops = formula(*args, **kwargs, out_val=out)
    else:
        return Counter()
    # A recomputed forward pass runs inside of the backward pass and saves tensors for gradients;
    # the operations that compute gradients save nothing.
    in_backward = current_graph_task_id() != -1
    saves = top_saved_tensors_hooks(True) is not None
    return Counter({"again" if in_backward and saves else "model": flops})


def _attention_flops(given: dict[str, Any]) -> tuple[int, int]:
    """Return the FLOPs of attention scores and of the weighted sum of values.

    Causal attention counts half (PaLM, arXiv:2204.02311, appendix B). Attention with another mask
    counts in full, because fused kernels compute all scores.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    batch, heads, length, width = query.shape
    pairs = batch * heads * length * key.shape[-2]
    if given.get("is_causal"):
        pairs //= 2
    return 2 * pairs * width, 2 * pairs * int(value.shape[-1])


@dataclass
class StepCounts:
    """The collectives, FLOPs and stored bytes of one rank's step.

    Attributes:
        calls: the number of collectives by route.
        message_bytes: the bytes of the rank's inputs by route; see `match_collective`.
        flops: "model" and "again", see `count_flops`, and "optimizer" of the update.
        held: "parameters" in number, and bytes of "weights" and of the "optimizer"; those of a
            frozen model that the task learns from included.
    """

    calls: Counter[Route] = field(default_factory=Counter)
    message_bytes: Counter[Route] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)

    def with_update(self, update: StepCounts) -> StepCounts:
        """Return these counts with those of an optimizer step, whose state replaces the counted."""
        return StepCounts(
            self.calls + update.calls,
            self.message_bytes + update.message_bytes,
            self.flops + update.flops,
            Counter({**self.held, **update.held}),
        )


def extrapolate_counts(
    low: Counter[Any], high: Counter[Any], xs: Sequence[int], x: int
) -> Counter[Any]:
    """Return each count at `x`, on the line through the counts `low` and `high` at the two `xs`."""
    x0, x1 = xs
    return Counter(
        {key: low[key] + (high[key] - low[key]) * (x - x0) // (x1 - x0) for key in {*low, *high}}
    )


class StepCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs and collectives of operations that run while the mode is active."""

    def __init__(self, match_names: CollectiveMatcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = StepCounts()
        self.matcher = match_names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if call := self.matcher.match_collective(func, args, kwargs):
            route, size = call
            self.counts.calls[route] += 1
            self.counts.message_bytes[route] += size
        else:
            flops = count_flops(func, args, kwargs, out)
            is_update = self.matcher.in_update
            self.counts.flops += Counter(optimizer=flops.total()) if is_update else flops
        return out


def count_step(step: TrainStep, batches: Sequence[Batch], rank: int) -> StepCounts:
    """Run a step and return the counts of the step.

    Args:
        step: the rank's training step; its memory is real or simulated.
        batches: the batches of the step.
        rank: the rank.
    """
    counter = StepCounter(CollectiveMatcher(step.degrees, rank))
    with counter:
        step.accumulate(batches, lr_factor=1.0)
    if not step.optimizer.state:
        # The first update makes the state, which may be other work than later steps.
        step.weight_update.apply(1.0)
    counter.matcher.in_update = True
    count_updates(counter, step.optimizer, partial(step.update, 1.0))
    step.clear()
    parameters = list(step.parallel_model.model.parameters())
    if step.task.frozen and step.task.frozen.model is not step.parallel_model.model:
        parameters += step.task.frozen.model.parameters()
    counter.counts.held.update(
        parameters=sum(local(parameter).numel() for parameter in parameters),
        weights=_bytes(parameters),
        optimizer=bytes_of_state(step.optimizer),
    )
    return counter.counts


def count_updates(
    counter: StepCounter, optimizer: torch.optim.Optimizer, run_step: Callable[[], None]
) -> None:
    """Count a step of an optimizer, and of the steps of its period the mean of the FLOPs.

    Args:
        counter: counts the step.
        optimizer: has a `period`, if some steps compute more than others.
        run_step: runs a step.
    """
    period, flops = getattr(optimizer, "period", 1), counter.counts.flops
    with counter:
        run_step()
    rest = StepCounter(counter.matcher)
    with rest:
        for _ in range(period - 1):
            run_step()
    flops["optimizer"] = (flops["optimizer"] + rest.counts.flops["optimizer"]) // period


def bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state on this rank."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return _bytes(value for value in states if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
