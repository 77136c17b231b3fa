"""The whole recipe as one typed object."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import model_validator

from ...model_zoo.config import ModelConfig
from ..assemble.tables import KernelChoices
from ..checkpoint.tables import Checkpoint
from ..core.config import DEFAULTS, Table
from ..core.registry import Named, Registry, models
from ..data.tables import Data
from ..federated.server.tables import server_optimizers
from ..federated.tables import Federation, compressions, merges
from ..lora.tables import LoRA
from ..observe.tables import Metrics, Profile, monitors, trackers
from ..optim.tables import OptimizerConfig, ScheduleConfig, optimizers, schedules
from ..parallel.tables import Compile, Memory, Parallel
from ..precision.tables import Precision
from ..sources.configs import sources
from ..tasks.metrics.tables import metrics
from ..tasks.tables import LossConfig, TaskConfig, losses, tasks
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
    task: Annotated[TaskConfig, Named(tasks)] = DEFAULTS
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
    federation: Federation | None = None
    plugins: Annotated[Plugins, RegisteredTables()] = DEFAULTS

    @model_validator(mode="before")
    @classmethod
    def _fill_from_task(cls, values: Any) -> Any:
        """Name the task that the model is for, the loss of the task, and the packing of the data.

        What cannot be looked up stays as it is: its own table reports it.
        """
        if not isinstance(values, dict):
            return values
        given = {
            name: values.get(name, {})
            for name in ("model", "task", "loss", "data")
            if isinstance(values.get(name, {}), dict)
        }
        if len(given) < 4:
            return values
        model = given["model"].get("name", models.default)
        if "name" not in given["task"] and isinstance(model, str) and model in models:
            given["task"] = {"name": models[model].default_task, **given["task"]}
        name = given["task"].get("name", tasks.default)
        if not isinstance(name, str) or name not in tasks:
            return values
        task = tasks[name]
        given["loss"] = {"name": task.default_loss(given["task"]), **given["loss"]}
        given["data"] = {"packing": task.packings[0], **given["data"]}
        return {**values, **given}

    @model_validator(mode="after")
    def _adapt_model(self) -> Self:
        """Give the model the head that the task trains, so that all that reads it knows the head.

        The head is no key of `[model]`: a recipe is written without it, and read with it again.
        """
        # In place: an "after" validator of pydantic must return the object that it was given.
        self.__dict__["model"] = self.task.adapt_model(self.model)
        return self

    def for_largest_split(self) -> Recipe:
        """Return the recipe with the training split alone whose micro batches are the largest."""
        return self.model_copy(update={"data": self.data.largest}) if self.data.splits else self

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether the recipe says how many tokens the model embeds, so that rows may be added."""
        return getattr(self.model, "vocab_size", None) is not None

    @property
    def vocab_size(self) -> int:
        """Tokens that the model embeds: the tokenizer is asked if the model does not say."""
        given: int | None = getattr(self.model, "vocab_size", None)
        return given or self.tokenizer.build().vocab_size


REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (
        models,
        tasks,
        tokenizers,
        sources,
        optimizers,
        schedules,
        losses,
        trackers,
        monitors,
        metrics,
        server_optimizers,
        compressions,
        merges,
    )
}
