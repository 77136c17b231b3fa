"""What to do about a loss or gradient that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import Diverged
from ..precision.dtypes import LossScale
from ..recipe.tables import Resilience

if TYPE_CHECKING:
    from .step import Gradients


class Health:
    """Applies the `non_finite` policy. All ranks see the same global values, so they agree.

    On a GPU under the policy "stop" nothing waits for the device here: the first bad step is noted
    there, and `verify` looks at it when the host waits anyway.
    """

    def __init__(
        self,
        table: Resilience,
        device: torch.device,
        scale: LossScale,
        report: Callable[[str], None],
    ) -> None:
        self._policy = table.non_finite
        self._limit = table.max_skips
        self._scale = scale
        self._report = report
        self._looks_each_step = device.type == "cpu" or self._policy != "stop" or scale.dynamic
        self._first_bad = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = 0
        self._last_bad = 0
        self.wants_rollback = False

    def admits(self, gradients: Gradients, step: int) -> bool:
        """Return whether the optimizer may apply the gradients of `step`.

        Raises:
            Diverged: by policy, or after too many bad steps in a row.
        """
        self.wants_rollback = False
        finite = gradients.norm.isfinite() & gradients.loss.isfinite()
        if not self._looks_each_step:
            untouched = self._first_bad == 0
            self._first_bad += torch.where(untouched & ~finite, step, 0)
            return True
        if finite.item():
            self._scale.update(finite=True)
            if step > self._last_bad:  # a rollback's repeated steps are no progress
                self._in_a_row = 0
            return True
        loss, norm = gradients.loss.item(), gradients.norm.item()
        self._refuse(step, loss / max(1, int(gradients.tokens)), norm)
        return False

    def _refuse(self, step: int, loss: float, norm: float) -> None:
        overflow = self._scale.dynamic and self._scale.value > 1
        self._scale.update(finite=False)
        what = f"step {step}: loss {loss}, gradient norm {norm}"
        if overflow:
            self._report(f"{what}: fp16 overflow, loss scale now {self._scale.value:g}")
            return
        if self._policy == "stop":
            raise Diverged(
                what,
                'lower optimizer.lr, or set resilience.non_finite to "skip" or "rollback"',
            )
        self._in_a_row += 1
        self._last_bad = step
        if self._in_a_row > self._limit:
            raise Diverged(f"{what}: more than {self._limit} bad steps in a row")
        self.wants_rollback = self._policy == "rollback"
        action = "rolling back" if self.wants_rollback else "step skipped"
        self._report(f"{what}: {action} ({self._in_a_row} of at most {self._limit} in a row)")

    def verify(self) -> None:
        """Raise `Diverged` if a step since the start was bad. Waits for the device."""
        if self._looks_each_step:
            return
        if step := int(self._first_bad):
            raise Diverged(f"step {step}: loss or gradient is not finite")
