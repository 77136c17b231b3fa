"""What a training loop works with, how far it has come, and its best evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ..observe.metrics import VALIDATION
from ..optim.tables import ScheduleState

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...model_zoo.base import Model
    from ...model_zoo.config import ModelConfig
    from ..checkpoint.tables import Checkpoint
    from ..data.batch import Batch
    from ..data.dataset import Turns
    from ..data.loader import TurnLoader
    from ..launch.environment import World
    from ..observe.phases import PhaseTimer
    from ..optim.tables import ScheduleConfig
    from ..parallel.axis import ParallelModel
    from ..parallel.mesh import Degrees
    from ..tasks.metrics.metric_set import MetricSet
    from ..tasks.task import Task
    from ..tokenizers.tokenizer import Tokenizer
    from .average import Average
    from .lookahead import Lookahead
    from .step import TrainStep
    from .tables import Evaluate, Resilience


@dataclass
class Best:
    """The best evaluation so far, the same on every rank.

    Attributes:
        metric: name of the metric; the search starts again with another metric or direction.
        direction: "min" or "max".
        score: value of the metric, None before the first finite one.
        step: number of steps after which it was reached.
        bad: evaluations since then.
    """

    metric: str = ""
    direction: str = ""
    score: float | None = None
    step: int = 0
    bad: int = 0

    def update(self, table: Evaluate, step: int, values: Mapping[str, float]) -> bool:
        """Compare an evaluation with the best so far, and return whether it is the best now.

        A value that is not finite is never better, nor is one by less than `min_delta`. One that
        is equal to the best (without `min_delta`) takes its place, as the latest of equals,
        and is no improvement.
        """
        if not self.follows(table):
            self.metric, self.direction = table.score_key, _direction(table)
            self.score, self.step, self.bad = None, 0, 0
        value = values.get(table.score_key, math.nan)
        gain = math.inf
        if self.score is not None:
            gain = value - self.score if table.is_maximized else self.score - value
        is_best = math.isfinite(value) and gain >= table.min_delta
        self.bad = 0 if is_best and gain > 0 else self.bad + 1
        if is_best:
            self.score, self.step = value, step
        return is_best

    def is_exhausted(self, table: Evaluate) -> bool:
        """Return whether `patience` evaluations in a row brought no improvement."""
        return 0 < table.patience <= self.bad and self.follows(table)

    def follows(self, table: Evaluate) -> bool:
        """Return whether the score is the metric that `[evaluate]` names, in the same direction."""
        return (self.metric, self.direction) == (table.score_key, _direction(table))

    @staticmethod
    def from_manifest(extra: Mapping[str, Any]) -> Best:
        """Read the state from a manifest's `extra`; earlier versions have none."""
        return Best(**extra.get("best", {}))

    def describe(self) -> str:
        """Say why a run ends early."""
        best = "none was finite"
        if self.score is not None:
            best = f"the best is {self.score:.6g} at step {self.step}"
        return f"{self.metric} not better in {self.bad} evaluations ({best})"


def _direction(table: Evaluate) -> str:
    return "max" if table.is_maximized else "min"


@dataclass(frozen=True)
class ValidationSplit:
    """A split that evaluations measure, on this rank.

    Attributes:
        name: what rows call it.
        batches: this rank's batches, equally many on each rank.
        task: the task for the sources of the split.
        metrics: further measures; None: the recipe names none.
    """

    name: str
    batches: list[Batch]
    task: Task[Any]
    metrics: MetricSet | None = None


@dataclass(frozen=True)
class Parts:
    """Everything that a training loop works with, on this rank.

    Attributes:
        model_config: the sizes and names of the model.
        tokenizer: the tokenizer of the recipe.
        data: the samples of each training split, and what it holds out.
        degrees: the ranks along each axis of the mesh.
        parallel_model: the model, wrapped for distributed training.
        optimizer: the optimizer of `step`.
        average: the average of the weights that is evaluated, if there is one.
        lookahead: moves the weights ahead before each step, if the recipe says so.
        step: computes and applies gradients.
        phases: names and times the phases of a step.
        loader: reads this rank's batches.
        splits: what evaluations measure, the validation split first if anything is held out.
        total_steps: number of optimizer steps of the run.
        steps_per_epoch: optimizer steps in a pass over the training sources, not always a whole
            number; of several training splits, in a round over them.
        device: the device of this rank.
        world: the place of this rank among the processes.
        schedule: gives the learning rate's factor for a step.
        peak_lr: learning rate that the factor multiplies, for the log.
        named_rates: further peak rates that rows of metrics show, by key.
        stride: optimizer steps between the points at which the run can evaluate and save: 1, or
            those of a round.
        gc_interval: optimizer steps between garbage collections; 0 leaves them to Python.
        evaluate: the recipe's `[evaluate]`.
        checkpoint: the recipe's `[checkpoint]`.
        resilience: the recipe's `[resilience]`.
        notes: lines that the log shows before the first step.
    """

    model_config: ModelConfig
    tokenizer: Tokenizer
    data: Turns
    degrees: Degrees
    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    average: Average | None
    lookahead: Lookahead | None
    step: TrainStep
    phases: PhaseTimer
    loader: TurnLoader
    splits: list[ValidationSplit]
    total_steps: int
    steps_per_epoch: float
    device: torch.device
    world: World
    schedule: ScheduleConfig
    peak_lr: float
    named_rates: Mapping[str, float]
    stride: int
    gc_interval: int
    evaluate: Evaluate
    checkpoint: Checkpoint
    resilience: Resilience
    notes: list[str]

    @property
    def validation(self) -> list[Batch]:
        """This rank's batches of the validation split; none if nothing is held out."""
        return next((split.batches for split in self.splits if split.name == VALIDATION), [])

    @property
    def model(self) -> Model:
        """The unwrapped module."""
        return self.parallel_model.model

    def scale_rates(self, lr_factor: float) -> dict[str, float]:
        """Return the further rates of a step by key, for rows of metrics."""
        return {key: rate * lr_factor for key, rate in self.named_rates.items()}

    def lr_factor(self, position: Position) -> float:
        """Return what the peak learning rates are multiplied by in the step after a position."""
        factor = self.schedule.lr_factor(position.step, self.total_steps)
        return factor * position.schedule.ratio

    @property
    def averages(self) -> list[Average | Lookahead]:
        """What holds further weights that checkpoints keep."""
        return [each for each in (self.average, self.lookahead) if each]

    def start_step(
        self, position: Position, before_move: Callable[[], None] = lambda: None
    ) -> float:
        """Set the momentum of the next step, move the weights ahead, and return `lr_factor`.

        Args:
            position: where the step begins.
            before_move: called before the weights move, if they do.
        """
        factor = self.lr_factor(position)
        self.step.set_momentum(self.momentum(position))
        if self.lookahead:
            before_move()
            self.lookahead.start(position.step, factor)
        return factor

    def finish_step(self, step: int, *, is_updated: bool = True) -> None:
        """Update the averages of the weights.

        Args:
            step: finished optimizer steps, the one since `start_step` included.
            is_updated: whether the optimizer changed the weights in that step.
        """
        if self.lookahead:
            self.lookahead.finish(is_updated=is_updated)
        if self.average:
            self.average.update(step)

    def momentum(self, position: Position) -> Callable[[float], float] | None:
        """Return what maps the momentum of a parameter group to its value in the next step.

        None: the schedule does not change it.
        """
        if not self.schedule.changes_momentum:
            return None
        return partial(self.schedule.momentum, position.step, self.total_steps)


@dataclass
class Position:
    """How far a run is, which its checkpoints keep.

    Attributes:
        step: finished optimizer steps.
        batch: global batches that were read; ahead of `step` after a rollback.
        count: units of the task trained on; counted on the device, so that nothing waits for it.
        unevaluated: whether a signal stopped the evaluation after `step`, so that it is done again
            when the run resumes.
        best: the best evaluation so far.
        schedule: what evaluations have changed of the learning rate.
    """

    step: int = 0
    batch: int = 0
    count: int | Tensor = 0
    unevaluated: bool = False
    best: Best = field(default_factory=Best)
    schedule: ScheduleState = field(default_factory=ScheduleState)

    def record_score(self, parts: Parts, values: Mapping[str, float]) -> bool:
        """Compare an evaluation with those before, for the best checkpoint and the schedule.

        Args:
            parts: the parts of the run.
            values: the numbers of the evaluation after `step`, the same on all ranks; those of
                further splits are named `SPLIT.KEY`.

        Returns:
            whether the evaluation is the best so far.
        """
        table = parts.evaluate
        if not self.best.follows(table):  # scores of another metric cannot be compared
            self.schedule.best, self.schedule.bad = None, 0
        is_best = self.best.update(table, self.step, values)
        score = values.get(table.score_key, math.nan)
        parts.schedule.after_evaluation(
            self.schedule, self.step, score, maximize=table.is_maximized
        )
        return is_best
