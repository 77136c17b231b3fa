"""Recipe tables of the schedules of torch.optim.lr_scheduler, from the table of their signatures.

Torch is imported when a factor is first asked for.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Literal, Self

from pydantic import PrivateAttr, create_model

from ...core.errors import Problem, RecipeError
from ..tables import ScheduleConfig
from .table import PREFIX, SCHEDULES, make_fields

TOTALS = {"CosineAnnealingLR": "T_max", "OneCycleLR": "total_steps"}
"""schedule -> the key that is the number of steps of the run if it is not given"""


class TorchSchedule(ScheduleConfig):
    """Base of the tables of schedules of torch.

    Rates in keys are values of `optimizer.lr`; the rates of parameter groups keep their proportion
    to it. A warmup of `warmup_steps` comes before the schedule.
    """

    torch_name: ClassVar[str]
    """the class of torch.optim.lr_scheduler"""

    _peak: float = PrivateAttr(1.0)
    _schedulers: dict[int, Any] = PrivateAttr(default_factory=dict)

    @property
    def depends_on_total(self) -> bool:  # type: ignore[override]
        """Whether the number of steps of the run takes the place of a key."""
        key = TOTALS.get(self.torch_name)
        return key is not None and getattr(self, key) is None

    @property
    def changes_momentum(self) -> bool:
        """Whether the momentum of optimizers changes."""
        return super().changes_momentum or bool(getattr(self, "cycle_momentum", False))

    def settle(self, steps_per_epoch: float, peak_lr: float) -> Self:
        """Return the schedule for the peak rate `optimizer.lr`.

        Raises:
            RecipeError: torch refuses a value.
        """
        settled = super().settle(steps_per_epoch, peak_lr).model_copy()
        settled._peak, settled._schedulers = peak_lr or 1.0, {}
        try:
            settled.after_warmup(0, 1)
        except (ValueError, ZeroDivisionError) as error:
            raise RecipeError([Problem(str(error), key="schedule")]) from error
        return settled

    def after_warmup(self, step: int, total: int) -> float:
        """Return the rate of torch's schedule at a step, as a share of the peak."""
        return float(self._group_at(step, total)["lr"]) / self._peak

    def momentum(self, step: int, total: int, own: float) -> float:
        """Return the momentum of torch's schedule, or `own` where it changes rates alone."""
        own = super().momentum(step, total, own)
        if not getattr(self, "cycle_momentum", False):
            return own
        step, total = max(0, step - self.warmup_steps), max(1, total - self.warmup_steps)
        return float(self._group_at(step, total)["momentum"])

    def build(self, total: int) -> Any:
        """Return the schedule of torch for a run of so many steps after the warmup."""
        import torch

        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=self._peak, momentum=0.9)
        make = getattr(torch.optim.lr_scheduler, self.torch_name)
        return make(optimizer, **self._options(total))

    def _group_at(self, step: int, total: int) -> dict[str, Any]:
        with warnings.catch_warnings():
            # torch warns of a step that it is told: here no steps were taken before it.
            warnings.simplefilter("ignore")
            if total not in self._schedulers:
                self._schedulers[total] = self.build(total)
            scheduler = self._schedulers[total]
            # A one-cycle schedule ends with an error: the rate stays as it is instead.
            scheduler.step(min(step, getattr(scheduler, "total_steps", step)))
        found: dict[str, Any] = scheduler.optimizer.param_groups[0]
        return found

    def _options(self, total: int) -> dict[str, Any]:
        options = {key: getattr(self, key) for key in SCHEDULES[self.torch_name]}
        key = TOTALS.get(self.torch_name)
        replacements = {"max_lr": self._peak, **({key: total} if key else {})}
        return {
            name: replacements.get(name) if value is None else value
            for name, value in options.items()
        }


def __getattr__(name: str) -> type[TorchSchedule]:
    """Make the table of a schedule when a recipe names it."""
    if name not in SCHEDULES:
        raise AttributeError(name)
    rows = dict(SCHEDULES[name])
    for key in {"max_lr", TOTALS.get(name, "")} & rows.keys():
        rows[key] = {**rows[key], "optional": True, "default": None}
    fields: dict[str, Any] = make_fields(rows)
    fields["name"] = (Literal[f"{PREFIX}{name}"], f"{PREFIX}{name}")
    config = create_model(name, __base__=TorchSchedule, __module__=__name__, **fields)
    config.__doc__ = f"`torch.optim.lr_scheduler.{name}`, with the keys and defaults of torch."
    config.torch_name = name
    globals()[name] = config
    return config
