"""What to do about a loss or gradient that is not finite, or that is far above those before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.errors import Diverged
from ..precision.hardware import LossScale
from .spikes import Spike, SpikeDetector
from .tables import Resilience

if TYPE_CHECKING:
    from .step import Gradients

MOST_PENDING = 256
"""steps that a GPU may be ahead of their examination"""
MOST_EVENTS = 1000
"""of a run; a run with more is not read step by step"""

Kind = Literal["non_finite", "spike", "drift"]


@dataclass(frozen=True)
class Event:
    """A step that is worth a look, as events.jsonl records it.

    Attributes:
        step: counted from 1.
        batch: number of the global batch, counted from 1; above `step` after a rollback.
        lr: of that step.
        action: what was done about it.
        spike: what the step was compared with, if it was.
    """

    kind: Kind
    step: int
    batch: int
    loss: float
    grad_norm: float
    lr: float
    action: str
    spike: Spike | None = None


@dataclass
class SkipCounts:
    """What has happened so far; a rollback does not undo it."""

    in_a_row: int = 0
    """bad steps without progress between them"""
    last_bad: int = 0
    """the newest bad step"""
    left_out: int = 0
    """steps whose gradients were not applied"""
    events: int = 0


class _Pending(NamedTuple):
    """A step whose numbers the host has not read yet.

    Attributes:
        values: loss and gradient norm, [2] fp32, on the device.
    """

    step: int
    batch: int
    lr: float
    values: Tensor


class Health:
    """Applies the policies `non_finite` and `spike`. All ranks see the same global values, so they
    agree.

    On a GPU nothing waits for the device here unless a policy must know before weights change
    ("skip", "rollback"): steps are examined when the host waits anyway, by `verify`.

    Args:
        table: the recipe's `[resilience]`.
        device: where gradients are.
        scale: the loss scale of fp16.
        report: tells the user.
        record: writes an event down.
    """

    def __init__(
        self,
        table: Resilience,
        device: torch.device,
        scale: LossScale,
        report: Callable[[str], None],
        record: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._table = table
        self._scale = scale
        self._report = report
        self._record = record
        acts = table.non_finite != "stop" or table.spike in ("skip", "rollback")
        self._looks_each_step = device.type == "cpu" or acts or scale.dynamic
        self._detector = SpikeDetector(table.spike_window, table.spike_threshold)
        self._pending: list[_Pending] = []
        self._last_spike = 0
        self._has_learned: bool | None = None
        self._bad_evaluation = ""
        self.counts = SkipCounts()
        self.wants_rollback = False

    def should_step(self, gradients: Gradients, step: int, batch: int, lr: float) -> bool:
        """Return whether the optimizer may apply the gradients of `step`.

        Args:
            gradients: of the step.
            step: counted from 1.
            batch: number of the global batch, counted from 1.
            lr: of the step.

        Raises:
            Diverged: by policy, or after too many bad steps in a row.
        """
        self.wants_rollback = False
        loss, total = gradients.loss / gradients.tokens.clamp(min=1), gradients.total_loss
        loss = torch.where(total.isfinite(), loss, total)  # a regulariser may overflow alone
        values = torch.stack([loss.float(), gradients.norm.float()])
        self._pending.append(_Pending(step, batch, lr, values))
        if self._looks_each_step or len(self._pending) == MOST_PENDING:
            return self._examine()
        return True

    def verify(self) -> None:
        """Examine the steps that have not been; waits for the device.

        Raises:
            Diverged: one of them was not finite.
        """
        self._examine()

    def _examine(self) -> bool:
        """Return whether the newest step may be applied."""
        pending, self._pending = self._pending, []
        if not pending:
            return True
        numbers = torch.stack([each.values for each in pending]).tolist()
        return [
            self._judge(each, loss, norm)
            for each, (loss, norm) in zip(pending, numbers, strict=True)
        ][-1]

    def _judge(self, at: _Pending, loss: float, norm: float) -> bool:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._refuse_non_finite(at, loss, norm)
            return False
        self._scale.update(finite=True)
        self._has_learned = self._has_learned or norm > 0
        if self._table.spike != "off":
            if spike := self._detector.judge(loss, norm):
                self._take_spike(at, loss, norm, spike)
                if self._table.spike != "warn":
                    return False  # and it stays out of the window, which would get used to it
            if self._detector.add(at.step, loss, norm):
                self._note(Event("drift", at.step, at.batch, loss, norm, at.lr, "warn"))
                self._report(f"step {at.step}: training is diverging: {self._losses()}")
        if at.step > self.counts.last_bad:  # a rollback's repeated steps are no progress
            self.counts.in_a_row = 0
        return True

    def _refuse_non_finite(self, at: _Pending, loss: float, norm: float) -> None:
        overflow = self._scale.dynamic and self._scale.value > 1
        self._scale.update(finite=False)
        what = f"step {at.step}: loss {loss}, gradient norm {norm}"
        if overflow:
            self._report(f"{what}: fp16 overflow, loss scale now {self._scale.value:g}")
            return
        policy = self._table.non_finite
        event = Event("non_finite", at.step, at.batch, loss, norm, at.lr, policy)
        self._note(event)
        if policy == "stop":
            raise Diverged(
                f"step {at.step}: loss or gradient is not finite: {loss} and {norm}",
                'lower optimizer.lr, or set resilience.non_finite to "skip" or "rollback"',
            )
        self._leave_out(what, at.step, policy)

    def _take_spike(self, at: _Pending, loss: float, norm: float, spike: Spike) -> None:
        policy = self._table.spike
        is_first = at.step != self._last_spike + 1
        self._last_spike = at.step
        if policy == "warn" and not is_first:
            return  # one event for a row of spikes: the first step is the one to look at
        self._note(Event("spike", at.step, at.batch, loss, norm, at.lr, policy, spike))
        what = f"step {at.step}: spike: {_compare(loss, norm, spike)}"
        if policy == "warn":
            self._report(what)
        else:
            self._leave_out(what, at.step, policy)

    def _leave_out(self, what: str, step: int, policy: str) -> None:
        """Skip a step or roll back, unless that has happened too often in a row."""
        counts, limit = self.counts, self._table.max_skips
        counts.in_a_row += 1
        counts.left_out += 1
        counts.last_bad = step
        if counts.in_a_row > limit:
            raise Diverged(f"{what}: more than {limit} bad steps in a row")
        self.wants_rollback = policy == "rollback"
        action = "rolling back" if self.wants_rollback else "step skipped"
        self._report(f"{what}: {action} ({counts.in_a_row} of at most {limit} in a row)")

    def _note(self, event: Event) -> None:
        self.counts.events += 1
        if self.counts.events <= MOST_EVENTS:
            self._record(event)
        if self.counts.events == MOST_EVENTS:
            self._report(f"{MOST_EVENTS} events: no more are recorded")

    def take_evaluation(self, step: int, loss: float) -> None:
        """Tell of a validation loss that is not finite; `conclude` knows the last one."""
        is_bad = not math.isfinite(loss)
        self._bad_evaluation = f"the validation loss at step {step} is {loss}" if is_bad else ""
        if is_bad:
            self._report(self._bad_evaluation)

    def conclude(self) -> list[str]:
        """Return what is wrong with a run that ends well otherwise, a sentence each."""
        self.verify()
        found = [self._bad_evaluation] if self._bad_evaluation else []
        if self._detector.losses()[0] > self._detector.loss_limit():
            found.append(f"training diverged: {self._losses()}")
        if self.counts.left_out:
            found.append(f"steps left out: {self.counts.left_out} (see events.jsonl)")
        if self._has_learned is False:
            found.append("nothing was learned: no step had a gradient")
        return found

    def _losses(self) -> str:
        last, best, step = self._detector.losses()
        return f"the loss is {last:.5g}, after {best:.5g} at step {step}"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest keeps; `verify` comes first."""
        return {
            "detector": self._detector.state(),
            "last_spike": self._last_spike,
            "has_learned": self._has_learned,
            "bad_evaluation": self._bad_evaluation,
            "counts": asdict(self.counts),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; empty from checkpoints of former versions."""
        self._pending.clear()
        self._detector.restore(state.get("detector", {}))
        self._last_spike = state.get("last_spike", 0)
        self._has_learned = state.get("has_learned")
        self._bad_evaluation = state.get("bad_evaluation", "")
        self.counts = SkipCounts(**state.get("counts", {}))


def _compare(loss: float, norm: float, spike: Spike) -> str:
    """Return the numbers that are too high, beside what is usual."""
    numbers = {"loss": (loss, spike.loss), "grad_norm": (norm, spike.grad_norm)}
    return ", ".join(
        f"{name.replace('grad_', 'gradient ')} {value:.5g} (median {level.median:.5g}, limit "
        f"{level.limit:.5g})"
        for name, (value, level) in numbers.items()
        if name in spike.signals
    )
