"""The recipe's `[evaluate]`, `[ema]` and `[resilience]` tables. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from ..core.config import DEFAULTS, Count, CountOrZero, Fraction, RecipePath, SplitName, Table
from ..core.registry import Named
from ..observe.metrics import VALIDATION
from ..sources.configs import SourceConfig, sources
from ..tasks.metrics.tables import MetricConfig, metrics

AnyMetric = Annotated[MetricConfig, Named(metrics)]
"""any metric's table; outside `Evaluate`, whose field has the name of the registry"""


class EvaluationSplit(Table):
    """A further split that evaluations measure."""

    name: SplitName
    """what rows of metrics.jsonl and evaluate.metric call it"""
    sources: Annotated[list[Annotated[SourceConfig, Named(sources)]], Field(min_length=1)]
    """where the samples come from; all of them are measured, or the first ones"""
    steps: CountOrZero | None = None
    """batches of the split, 0: all; default: evaluate.steps"""
    micro_batch: Count | None = None
    """samples a forward pass, on each data rank; default: data.micro_batch"""
    seq_len: Count | None = None
    """tokens a row; default: data.seq_len"""


class Harness(Table):
    """Tasks of lm-evaluation-harness during training (extra [eval])."""

    tasks: list[Annotated[str, Field(min_length=1)]] = []
    """names of tasks, groups or tags, such as "hellaswag"; each score is a number of an evaluation,
    such as "hellaswag/acc" """
    interval: CountOrZero | None = None
    """optimizer steps between runs of the tasks, which also the end of training is; 0: only there;
    default: as evaluate.interval"""
    num_fewshot: CountOrZero | None = None
    """examples before each question; default: each task's own number"""
    limit: CountOrZero = 0
    """examples of each task; 0: all"""
    include_path: RecipePath = ""
    """a folder with more tasks, whose files may name Python code, which runs"""


class Evaluate(Table):
    """Loss on the validation split."""

    interval: CountOrZero = 50
    """optimizer steps between evaluations; 0: never"""
    interval_epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """epochs between evaluations, in place of interval"""
    steps: CountOrZero = 10
    """batches of the validation split; 0: all"""
    metric: str = "loss"
    """what the best checkpoint, early stopping and the schedule "plateau" go by: "loss", another
    number of the task, or the key of one of the metrics; also SPLIT.KEY"""
    direction: Literal["min", "max"] | None = None
    """whether a lower or a higher value of the metric is better; default: what the metric says"""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """a smaller change than this is no improvement"""
    patience: CountOrZero = 0
    """evaluations in a row without improvement before the run ends early; 0: never"""
    metrics: list[AnyMetric] = []
    """more measures of a validation; each adds a key to the rows of evaluations"""
    splits: list[EvaluationSplit] = []
    """more splits that each evaluation measures; each has a row of its own"""
    harness: Harness = DEFAULTS
    """tasks of lm-evaluation-harness beside the splits"""

    @property
    def is_enabled(self) -> bool:
        """Whether there are evaluations."""
        return self.interval > 0 or self.interval_epochs is not None

    @property
    def score_key(self) -> str:
        """The key of the metric in the rows of an evaluation, those of further splits prefixed."""
        return self.metric.removeprefix(f"{VALIDATION}.")

    @property
    def follows_task(self) -> bool:
        """Whether the metric is a score of one of the harness's tasks."""
        is_task = bool(self.harness.tasks) and "/" in self.score_key
        return is_task and not any(map(self._is_followed, self.metrics))

    @property
    def follows_validation(self) -> bool:
        """Whether the metric is a number of the validation split."""
        return not self.follows_task and self.number_key == self.score_key

    @property
    def number_key(self) -> str:
        """The key of the metric in the row of its split."""
        split, dot, key = self.score_key.partition(".")
        return key if dot and split in {each.name for each in self.splits} else self.score_key

    def settle(self, scores: Mapping[str, bool]) -> Evaluate:
        """Return the table with the direction of the metric.

        Args:
            scores: numbers of the task, and whether higher ones are better.
        """
        is_maximized = self.is_maximized
        if self.direction is None:
            is_maximized |= scores.get(self.number_key, False)
        return self.model_copy(update={"direction": "max" if is_maximized else "min"})

    @property
    def is_maximized(self) -> bool:
        """Whether a higher value of the metric is better."""
        if self.direction is not None:
            return self.direction == "max"
        return any(each.higher_is_better for each in self.metrics if self._is_followed(each))

    def _is_followed(self, metric: MetricConfig) -> bool:
        # One of several numbers has the name KEY/NUMBER.
        return self.number_key == metric.row_key or self.number_key.startswith(f"{metric.row_key}/")


class Nesterov(Table):
    """EMA-Nesterov: gradients are computed ahead of the weights, along their mean change."""

    scale: Annotated[float, Field(ge=0)] = 0.0
    """how far ahead at the peak rate, as a multiple of the mean change, such as 0.3; 0: none"""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """share of the mean change that each step keeps"""
    start: Fraction = 0.15
    """share of the steps of the run before the first look ahead"""
    end: Fraction = 0.75
    """share of the steps of the run after which there is none any more"""


class EMA(Table):
    """An exponential moving average of the weights."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the average that each update keeps, such as 0.999; 0: no average"""
    interval: Count = 1
    """optimizer steps between updates of the average"""
    last_steps: CountOrZero = 0
    """the average begins so many steps before the end of the run; 0: at the first update"""
    blend: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of the average in the weights that are evaluated; the trained weights get the rest"""
    nesterov: Nesterov = DEFAULTS
    """look ahead along the mean change of the weights (arXiv:2605.25395)"""


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
