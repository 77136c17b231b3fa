"""The whole recipe as one typed object."""

from __future__ import annotations

from typing import Annotated, Any

from ...model_zoo.config import ModelConfig
from ...model_zoo.llama3.config import Llama3Config
from ..core.config import Table
from ..core.models import models
from ..core.registry import Named, Registry
from ..data.tables import Data
from ..loss.tables import CrossEntropy, LossConfig, losses
from ..observe.configs import trackers
from ..optim.configs import WSD, AdamW, OptimizerConfig, ScheduleConfig, optimizers, schedules
from ..parallel.tables import Parallel
from ..sources import chat_configs, column_configs  # noqa: F401 - registers them
from ..sources.configs import BytesTokenizer, TokenizerConfig, sources, tokenizers
from . import tables


class Recipe(Table):
    """One training run, as one TOML file describes it."""

    run: tables.Run = tables.Run()
    model: Annotated[ModelConfig, Named(models)] = Llama3Config()
    tokenizer: Annotated[TokenizerConfig, Named(tokenizers)] = BytesTokenizer()
    data: Data = Data()
    optimizer: Annotated[OptimizerConfig, Named(optimizers)] = AdamW()
    schedule: Annotated[ScheduleConfig, Named(schedules)] = WSD()
    loss: Annotated[LossConfig, Named(losses)] = CrossEntropy()
    parallel: Parallel = Parallel()
    precision: tables.Precision = tables.Precision()
    memory: tables.Memory = tables.Memory()
    compile: tables.Compile = tables.Compile()
    kernels: tables.Kernels = tables.Kernels()
    checkpoint: tables.Checkpoint = tables.Checkpoint()
    evaluate: tables.Evaluate = tables.Evaluate()
    ema: tables.EMA = tables.EMA()
    lora: tables.LoRA = tables.LoRA()
    metrics: tables.Metrics = tables.Metrics()
    profile: tables.Profile = tables.Profile()
    resilience: tables.Resilience = tables.Resilience()
    plugins: tables.Plugins = tables.Plugins()

    @property
    def vocab_size(self) -> int:
        """Tokens that the model embeds: the tokenizer is asked if the model does not say."""
        given: int | None = getattr(self.model, "vocab_size", None)
        return given or self.tokenizer.build().vocab_size


REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (models, tokenizers, sources, optimizers, schedules, losses, trackers)
}
