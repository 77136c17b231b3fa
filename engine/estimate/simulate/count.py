"""Counts what one rank's step computes and sends: operation by operation, real or simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.local import local
from .collectives import Listener, Route

if TYPE_CHECKING:
    from ...data.batch import Batch
    from ...train.step import TrainStep


_aten = torch.ops.aten
_FACTORS = {
    _aten.mm: 0,
    _aten.bmm: 0,
    _aten.addmm: 1,
    _aten.addmm_: 1,
    _aten.baddbmm: 1,
    _aten.baddbmm_: 1,
    _aten._scaled_mm: 0,
    _aten._grouped_mm: 0,
}
"""operation -> which argument the first factor is; the second one follows"""
_OURS = ("trainer::grouped_mm", "trainer::grouped_dw")
"""operations of our own whose first two arguments are the factors"""
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")


class Work(NamedTuple):
    """Floating-point operations.

    Attributes:
        model: what the mathematics asks for.
        again: what was computed before, and was not kept.
    """

    model: int = 0
    again: int = 0


def work_of(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Work:
    """Return the work of one operation: two for each product that is summed."""
    packet = operation.overloadpacket
    if packet in _FACTORS or operation.name().startswith(_OURS):
        first = _FACTORS.get(packet, 0)
        return _in_recomputation(2 * args[first].numel() * out.shape[-1])
    if operation._opname.startswith(_ATTENTION):
        names = (argument.name for argument in operation._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        scores, values = _attention(given)
        if operation._opname.endswith(("backward", "backward_for_cpu")):
            # It makes the scores anew, which no fused kernel keeps.
            return Work(2 * (scores + values), scores)
        return _in_recomputation(scores + values)
    return Work()


def _in_recomputation(count: int) -> Work:
    # What runs again saves tensors for gradients; what computes gradients does not.
    in_backward = torch._C._current_graph_task_id() != -1
    saves = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return Work(again=count) if in_backward and saves else Work(model=count)


def _attention(given: dict[str, Any]) -> tuple[int, int]:
    """Return the work of scores and of weighted values.

    Causal attention counts at half (PaLM, arXiv:2204.02311, appendix B), attention with a mask in
    full: fused kernels compute all of it.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    batch, heads, length, width = query.shape
    pairs = batch * heads * length * key.shape[-2]
    if given.get("is_causal"):
        pairs //= 2
    return 2 * pairs * width, 2 * pairs * int(value.shape[-1])


@dataclass
class StepCounts:
    """What one rank's step needs.

    Attributes:
        calls: collectives, by route.
        message_bytes: what the rank puts into them; see `traffic.Call`.
        flops: "model" and "again"; see `flops.Work`.
        held: "parameters" in number, and bytes of "weights" and of the "optimizer".
    """

    calls: Counter[Route] = field(default_factory=Counter)
    message_bytes: Counter[Route] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)


class StepCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills in `StepCounts` from all operations that run meanwhile."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = StepCounts()
        self._listener = listener

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if call := self._listener.heard(func, args, kwargs):
            self.counts.calls[call.route] += 1
            self.counts.message_bytes[call.route] += call.message_bytes
        elif any(work := work_of(func, args, kwargs, found)):
            self.counts.flops.update(work._asdict())
        return found


def count_step(step: TrainStep, batches: Sequence[Batch], rank: int) -> StepCounts:
    """Run a step, and return what it needed.

    Args:
        step: of this rank; its memory is real or simulated.
        batches: what it computes.
        rank: this one.
    """
    model = step.parallel_model.model
    counter = StepCounter(Listener(step.degrees, rank))
    with counter:
        step.accumulate(batches, lr_factor=1.0)
        step.update(1.0)
    step.clear()
    counts = counter.counts
    parameters = list(model.parameters())
    states = (each for state in step.optimizer.state.values() for each in state.values())
    counts.held["parameters"] = sum(local(each).numel() for each in parameters)
    counts.held["weights"] = _bytes(parameters)
    counts.held["optimizer"] = _bytes(each for each in states if isinstance(each, Tensor))
    return counts


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(each).nbytes for each in tensors)
