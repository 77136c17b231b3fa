"""The whole recipe as one typed object."""

from __future__ import annotations

from typing import Annotated, Any

from ...model_zoo.config import ModelConfig
from ..assemble.tables import KernelChoices
from ..checkpoint.tables import Checkpoint
from ..core.config import DEFAULTS, Table
from ..core.registry import Named, Registry, models
from ..data.tables import Data
from ..lora.tables import LoRA
from ..loss.tables import LossConfig, losses
from ..observe.tables import Metrics, Profile, trackers
from ..optim.tables import OptimizerConfig, ScheduleConfig, optimizers, schedules
from ..parallel.tables import Compile, Memory, Parallel
from ..precision.tables import Precision
from ..sources.configs import sources
from ..tokenizers.configs import TokenizerConfig, tokenizers
from ..train.tables import EMA, Evaluate, Resilience
from .tables import Plugins, RegisteredTables, Run


class Recipe(Table):
    """One training run, as one TOML file describes it."""

    run: Run = DEFAULTS
    model: Annotated[ModelConfig, Named(models)] = DEFAULTS
    tokenizer: Annotated[TokenizerConfig, Named(tokenizers)] = DEFAULTS
    data: Data = DEFAULTS
    optimizer: Annotated[OptimizerConfig, Named(optimizers)] = DEFAULTS
    schedule: Annotated[ScheduleConfig, Named(schedules)] = DEFAULTS
    loss: Annotated[LossConfig, Named(losses)] = DEFAULTS
    parallel: Parallel = DEFAULTS
    precision: Precision = DEFAULTS
    memory: Memory = DEFAULTS
    compile: Compile = DEFAULTS
    kernels: KernelChoices = DEFAULTS
    checkpoint: Checkpoint = DEFAULTS
    evaluate: Evaluate = DEFAULTS
    ema: EMA = DEFAULTS
    lora: LoRA = DEFAULTS
    metrics: Metrics = DEFAULTS
    profile: Profile = DEFAULTS
    resilience: Resilience = DEFAULTS
    plugins: Annotated[Plugins, RegisteredTables()] = DEFAULTS

    @property
    def vocab_size(self) -> int:
        """Tokens that the model embeds: the tokenizer is asked if the model does not say."""
        given: int | None = getattr(self.model, "vocab_size", None)
        return given or self.tokenizer.build().vocab_size


REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (models, tokenizers, sources, optimizers, schedules, losses, trackers)
}
