"""The whole recipe as one typed object."""

from __future__ import annotations

from typing import Annotated, Any

from ...model_zoo.config import ModelConfig
from ...model_zoo.llama3.config import Llama3Config
from ..assemble.tables import KernelChoices
from ..checkpoint.tables import Checkpoint
from ..core.config import Table
from ..core.models import models
from ..core.registry import Named, Registry
from ..corpus import configs  # noqa: F401 - registers them
from ..data.tables import Data
from ..lora.tables import LoRA
from ..loss.tables import CrossEntropy, LossConfig, losses
from ..observe.tables import Metrics, Profile, trackers
from ..optim.configs import WSD, AdamW, OptimizerConfig, ScheduleConfig, optimizers, schedules
from ..parallel.tables import Compile, Memory, Parallel
from ..precision.tables import Precision
from ..sources import chat, hub, parquet  # noqa: F401 - registers them
from ..sources.configs import sources
from ..tokenizers.configs import BytesTokenizer, TokenizerConfig, tokenizers
from ..train.tables import EMA, Evaluate, Resilience
from .tables import Plugins, Run


class Recipe(Table):
    """One training run, as one TOML file describes it."""

    run: Run = Run()
    model: Annotated[ModelConfig, Named(models)] = Llama3Config()
    tokenizer: Annotated[TokenizerConfig, Named(tokenizers)] = BytesTokenizer()
    data: Data = Data()
    optimizer: Annotated[OptimizerConfig, Named(optimizers)] = AdamW()
    schedule: Annotated[ScheduleConfig, Named(schedules)] = WSD()
    loss: Annotated[LossConfig, Named(losses)] = CrossEntropy()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    memory: Memory = Memory()
    compile: Compile = Compile()
    kernels: KernelChoices = KernelChoices()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    ema: EMA = EMA()
    lora: LoRA = LoRA()
    metrics: Metrics = Metrics()
    profile: Profile = Profile()
    resilience: Resilience = Resilience()
    plugins: Plugins = Plugins()

    @property
    def vocab_size(self) -> int:
        """Tokens that the model embeds: the tokenizer is asked if the model does not say."""
        given: int | None = getattr(self.model, "vocab_size", None)
        return given or self.tokenizer.build().vocab_size


REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (models, tokenizers, sources, optimizers, schedules, losses, trackers)
}
