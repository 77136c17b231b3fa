"""The policies for a loss or gradient norm that is not finite, or far above the ones before."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import Diverged
from ..precision.hardware import LossScale
from .events import Event
from .spikes import Spike, SpikeDetector
from .tables import Resilience

if TYPE_CHECKING:
    from .step import Gradients

MOST_PENDING = 256
"""steps that may be computed before they are examined"""
MOST_EVENTS = 1000
"""events that are recorded of a run"""


@dataclass
class SkipCounts:
    """What has gone wrong in a run so far; a rollback does not undo it.

    Attributes:
        in_a_row: bad steps without progress between them.
        last_bad: the newest bad step.
        left_out: steps whose gradients were not applied.
        events: events of the run, recorded or not.
    """

    in_a_row: int = 0
    last_bad: int = 0
    left_out: int = 0
    events: int = 0


class _Pending(NamedTuple):
    """A step whose loss and gradient norm the host has not read yet.

    Attributes:
        values: loss and gradient norm, [2] fp32, on the device.
    """

    step: int
    batch: int
    lr: float
    values: Tensor


class Health:
    """Applies the policies `non_finite` and `spike` to each step.

    All ranks see the same global values, so they decide alike without a collective. On a GPU
    nothing waits for the device unless a policy must know before weights change ("skip" of spikes,
    "rollback"): `verify` examines the steps when the host waits in any case. The update of a step
    that is not finite can be left out on the device, see `is_bad`.

    Args:
        table: the recipe's `[resilience]`.
        device: the device of this rank.
        scale: the loss scale of fp16.
        report: shows a message to the user.
        record: writes an event to events.jsonl.
        can_skip: whether the update takes `is_bad`; else `non_finite = "skip"` makes the host wait
            in each step.

    Attributes:
        counts: what has gone wrong so far.
        is_bad: 1 on the device if the newest step must be skipped, else 0; None: `should_step` has
            told the host.
        wants_rollback: whether the last step asked for a rollback.
    """

    def __init__(
        self,
        table: Resilience,
        device: torch.device,
        scale: LossScale,
        report: Callable[[str], None],
        record: Callable[[Event], None] = lambda event: None,
        *,
        can_skip: bool = False,
    ) -> None:
        self._table = table
        self._scale = scale
        self._report = report
        self._record = record
        # Loss scaling must know of an overflow before weights change, as "skip" does.
        skips = table.non_finite == "skip"
        acts = table.spike in ("skip", "rollback") or table.non_finite == "rollback"
        acts = acts or (skips and not can_skip)
        self._examines_each_step = device.type == "cpu" or acts or scale.dynamic
        self._skips_on_device = skips and not self._examines_each_step
        self.is_bad: Tensor | None = None
        self._detector = SpikeDetector(table.spike_window, table.spike_threshold)
        self._pending: list[_Pending] = []
        self._last_spike = 0
        self._has_learned: bool | None = None
        self._bad_evaluation = ""
        self.counts = SkipCounts()
        self.wants_rollback = False

    def should_step(self, gradients: Gradients, step: int, batch: int, lr: float) -> bool:
        """Return whether the optimizer may apply the gradients of a step, subject to `is_bad`.

        Args:
            gradients: the results of the step's backward pass.
            step: number of the step, counted from 1.
            batch: number of the global batch, counted from 1.
            lr: learning rate of the step.

        Raises:
            Diverged: by policy, or after too many bad steps in a row.
        """
        self.wants_rollback = False
        loss, total = gradients.loss, gradients.total_loss
        loss = torch.where(total.isfinite(), loss, total)  # a regulariser may overflow alone
        # Read later, in one copy with the values of other steps.
        values = torch.stack([loss.float(), gradients.norm.float()])
        self._pending.append(_Pending(step, batch, lr, values))
        if self._skips_on_device:
            self.is_bad = (~values.isfinite().all()).float()
        if self._examines_each_step or len(self._pending) == MOST_PENDING:
            return self.verify()
        return True

    def verify(self) -> bool:
        """Examine all steps that are pending, which waits for the device.

        Returns:
            whether the newest step may be applied.

        Raises:
            Diverged: a step was not finite, and the policy is to stop.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return True
        # One copy from the device for all of them.
        numbers = torch.stack([step.values for step in pending]).tolist()
        return [
            self._judge(step, loss, norm)
            for step, (loss, norm) in zip(pending, numbers, strict=True)
        ][-1]

    def _judge(self, at: _Pending, loss: float, norm: float) -> bool:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._refuse_non_finite(at, loss, norm)
            return False
        self._scale.update(finite=True)
        self._has_learned = self._has_learned or norm > 0
        if self._table.spike != "off":
            if spike := self._detector.judge(loss, norm):
                self._handle_spike(at, loss, norm, spike)
                if self._table.spike != "warn":
                    return False  # and not added: spikes would become the usual values
            if self._detector.add(at.step, loss, norm):
                self._note(Event("drift", at.step, at.batch, loss, norm, at.lr, "warn"))
                self._report(f"step {at.step}: training is diverging: {self._describe_losses()}")
        # The steps that a rollback repeats are no progress.
        if at.step > self.counts.last_bad:
            self.counts.in_a_row = 0
        return True

    def _refuse_non_finite(self, at: _Pending, loss: float, norm: float) -> None:
        # With fp16 an overflow is usual until the scale has halved often enough; at a scale of 1
        # the gradient itself is not finite.
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

    def _handle_spike(self, at: _Pending, loss: float, norm: float, spike: Spike) -> None:
        policy = self._table.spike
        is_first = at.step != self._last_spike + 1
        self._last_spike = at.step
        if policy == "warn" and not is_first:
            return  # one event for spikes in a row: the first step is the one to look at
        self._note(Event("spike", at.step, at.batch, loss, norm, at.lr, policy, spike))
        what = f"step {at.step}: spike: {_compare(loss, norm, spike)}"
        if policy == "warn":
            self._report(what)
        else:
            self._leave_out(what, at.step, policy)

    def _leave_out(self, what: str, step: int, policy: str) -> None:
        """Skip a step or ask for a rollback, unless that has happened too often in a row."""
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

    def check_evaluation(self, step: int, loss: float) -> None:
        """Report a validation loss that is not finite; `conclude` repeats the last one."""
        is_bad = not math.isfinite(loss)
        self._bad_evaluation = f"the validation loss at step {step} is {loss}" if is_bad else ""
        if is_bad:
            self._report(self._bad_evaluation)

    def conclude(self) -> list[str]:
        """Return a sentence for each thing that is wrong with a run that has finished."""
        self.verify()
        warnings = [self._bad_evaluation] if self._bad_evaluation else []
        if self._detector.losses()[0] > self._detector.loss_limit():
            warnings.append(f"training diverged: {self._describe_losses()}")
        if self.counts.left_out:
            warnings.append(
                f"steps skipped or rolled back: {self.counts.left_out} (see events.jsonl)"
            )
        if self._has_learned is False:
            warnings.append("nothing was learned: no step had a gradient")
        return warnings

    def _describe_losses(self) -> str:
        last, best, step = self._detector.losses()
        return f"the loss is {last:.5g}, after {best:.5g} at step {step}"

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint's manifest keeps; call `verify` before."""
        return {
            "detector": self._detector.state(),
            "last_spike": self._last_spike,
            "has_learned": self._has_learned,
            "bad_evaluation": self._bad_evaluation,
            "counts": asdict(self.counts),
        }

    def restore(self, state: Mapping[str, Any], *, keep_counts: bool = False) -> None:
        """Restore what `state` returned; checkpoints of earlier versions have nothing.

        Args:
            state: the state from a manifest.
            keep_counts: keep the counts of this run, so that rollbacks without progress end.
        """
        self._pending.clear()
        self._detector.restore(state.get("detector", {}))
        self._last_spike = state.get("last_spike", 0)
        self._has_learned = state.get("has_learned")
        self._bad_evaluation = state.get("bad_evaluation", "")
        if not keep_counts:
            self.counts = SkipCounts(**state.get("counts", {}))


def _compare(loss: float, norm: float, spike: Spike) -> str:
    """Describe the numbers that are too high, beside the usual ones."""
    numbers = {"loss": (loss, spike.loss), "grad_norm": (norm, spike.grad_norm)}
    return ", ".join(
        f"{name.replace('grad_', 'gradient ')} {value:.5g} (median {level.median:.5g}, limit "
        f"{level.limit:.5g})"
        for name, (value, level) in numbers.items()
        if name in spike.signals
    )
