"""Everything that a training loop works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from .best import Best

if TYPE_CHECKING:
    import torch

    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ..checkpoint.tables import Checkpoint
    from ..data.batch import Batch
    from ..data.dataset import OpenedData
    from ..data.loader import Loader
    from ..launch.environment import World
    from ..optim.configs import ScheduleConfig
    from ..parallel.data import ParallelModel
    from ..parallel.mesh import Degrees
    from ..tokenizers.tokenizer import Tokenizer
    from .average import WeightAverage
    from .step import TrainStep
    from .tables import Evaluate, Resilience


@dataclass(frozen=True)
class Parts:
    """Everything that a training loop needs, built and in place.

    Attributes:
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
