"""What a training loop works with, how far it has come, and its best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ..checkpoint.tables import Checkpoint
    from ..data.batch import Batch
    from ..data.dataset import OpenedData
    from ..data.loader import Loader
    from ..launch.environment import World
    from ..observe.phases import PhaseTimer
    from ..optim.tables import ScheduleConfig
    from ..parallel.axis import ParallelModel
    from ..parallel.mesh import Degrees
    from ..tokenizers.tokenizer import Tokenizer
    from .average import WeightAverage
    from .step import TrainStep
    from .tables import Evaluate, Resilience


@dataclass
class Best:
    """Every rank holds the same: what is evaluated is the same number on all of them."""

    metric: str = ""
    """what the score is of; another metric or direction starts anew"""
    direction: str = ""
    score: float | None = None
    step: int = 0
    """when it was reached"""
    bad: int = 0
    """evaluations since then"""

    def take(self, table: Evaluate, step: int, values: Mapping[str, float]) -> bool:
        """Take note of an evaluation; return whether it is the best so far.

        A value that is not finite never is. A smaller change than `min_delta` is no improvement.
        """
        if (self.metric, self.direction) != (table.metric, table.direction):
            self.metric, self.direction = table.metric, table.direction
            self.score, self.step, self.bad = None, 0, 0
        value = values[table.metric]
        gain = math.inf
        if self.score is not None:
            gain = self.score - value if table.direction == "min" else value - self.score
        if math.isfinite(value) and gain > 0 and gain >= table.min_delta:
            self.score, self.step, self.bad = value, step, 0
            return True
        self.bad += 1
        return False

    def is_exhausted(self, table: Evaluate) -> bool:
        """Return whether the run should end early."""
        return 0 < table.patience <= self.bad and (self.metric, self.direction) == (
            table.metric,
            table.direction,
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest keeps."""
        return asdict(self)

    @staticmethod
    def restored(extra: Mapping[str, Any]) -> Best:
        """Return what a manifest's `extra` says; nothing yet in those of former versions."""
        return Best(**extra.get("best", {}))

    def told(self) -> str:
        """Return in words why a run ends early."""
        found = "none was finite"
        if self.score is not None:
            found = f"the best is {self.score:.6g} at step {self.step}"
        return f"{self.metric} not better in {self.bad} evaluations ({found})"


@dataclass(frozen=True)
class Parts:
    """Everything that a training loop needs, built and in place.

    Attributes:
        phases: names and times the phases of the step and of what surrounds it.
        peak_lr: learning rate that the schedule's factor multiplies, for the log.
        global_batch: samples of one optimizer step.
        gc_interval: optimizer steps between collections of Python's garbage; 0: left to Python.
        notes: what the log says before the first step.
    """

    model_config: ModelConfig
    tokenizer: Tokenizer
    data: OpenedData
    degrees: Degrees
    parallel_model: ParallelModel
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    step: TrainStep
    phases: PhaseTimer
    loader: Loader
    validation: list[Batch]
    total_steps: int
    device: torch.device
    world: World
    schedule: ScheduleConfig
    peak_lr: float
    global_batch: int
    gc_interval: int
    evaluate: Evaluate
    checkpoint: Checkpoint
    resilience: Resilience
    notes: list[str]

    @property
    def model(self) -> LanguageModel:
        """The bare module."""
        return self.parallel_model.model


@dataclass
class Position:
    """Counts that a resumed run goes on from."""

    step: int = 0
    """finished optimizer steps"""
    batch: int = 0
    """global batches read; ahead of `step` after a rollback"""
    tokens: int | Tensor = 0
    """tokens trained on; counted on the device, so that nothing waits for it"""
    unevaluated: bool = False
    """a signal stopped the evaluation after `step`, which is to be done when the run resumes"""
    best: Best = field(default_factory=Best)
    """the best evaluation so far"""
