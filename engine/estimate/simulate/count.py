"""Counts what one rank's step computes and sends: operation by operation, real or simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.local import local
from ..flops import work_of
from ..traffic import Listener, Route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...data.batch import Batch
    from ...train.step import TrainStep


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
        step.set_rate(1.0)
        step.accumulate(batches)
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
