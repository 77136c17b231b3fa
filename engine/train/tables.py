"""The recipe's `[evaluate]`, `[ema]` and `[resilience]` tables. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..core.config import Count, CountOrZero, Table


class Evaluate(Table):
    """Loss on the validation split."""

    interval: CountOrZero = 50
    """optimizer steps between evaluations; 0: never"""
    steps: Count = 10
    """batches of the validation split"""
    metric: Literal["loss", "perplexity"] = "loss"
    """what the best checkpoint and early stopping go by"""
    direction: Literal["min", "max"] = "min"
    """whether a lower or a higher value of the metric is better"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """a smaller change than this is no improvement"""
    patience: CountOrZero = 0
    """evaluations in a row without improvement before the run ends early; 0: never"""


class EMA(Table):
    """An exponential moving average of the weights."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the average that each update keeps, such as 0.999; 0: no average"""
    interval: Count = 1
    """optimizer steps between updates of the average"""


class Resilience(Table):
    """What happens when something goes wrong."""

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """a NaN or infinite loss or gradient: "stop" the run, "skip" the step, or "rollback" to the
    newest checkpoint and resume after the data that led there"""
    spike: Literal["off", "warn", "skip", "rollback"] = "warn"
    """a loss or gradient norm far above those of the steps before: do nothing, "warn", "skip" the
    step, or "rollback" to the newest checkpoint and resume after the data that led there"""
    spike_window: Annotated[int, Field(ge=8, le=4096)] = 128
    """how many steps before it a step is compared with; fewer at first, but a quarter of them"""
    spike_threshold: Annotated[float, Field(gt=0, le=1000)] = 8.0
    """a spike is so many standard deviations above the median, estimated by the median absolute
    deviation; of the gradient norm's logarithm"""
    max_skips: Count = 10
    """consecutive skips, or rollbacks without progress, before the run stops"""
    stop_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """how long `--nproc` waits for ranks to save after a signal before it kills them"""
    collective_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """how long a rank waits for the others before the run fails"""
    hang_timeout_seconds: Annotated[float, Field(gt=0, le=86400)] | None = None
    """a rank without progress for so long hangs: all ranks write their stacks to logs/, and the run
    fails; default: half of collective_timeout_seconds"""

    @property
    def hang_seconds(self) -> float:
        """The time limit of the watchdog."""
        return self.hang_timeout_seconds or self.collective_timeout_seconds / 2
