"""What a plugin builds on: each registry, and the base class of the tables registered in it.

These names stay where they are; other modules may move between versions. Torch-free, but for the
base class of modules: torch is imported when a plugin asks for one of those.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .engine.checkpoint.tables import CheckpointMode, checkpoint_modes
from .engine.core.config import Component, Count, CountOrZero, LocalPath, RecipePath, Table
from .engine.core.errors import (
    CheckpointError,
    DataError,
    EnvironmentFault,
    Problem,
    RecipeError,
    TrainerError,
)
from .engine.core.registry import Registry, models
from .engine.corpus.configs import TokenSource
from .engine.federated.arrivals.tables import DropoutConfig, dropouts
from .engine.federated.server.tables import ServerOptimizerConfig, server_optimizers
from .engine.federated.tables import CompressionConfig, MergeConfig, compressions, merges
from .engine.observe.tables import (
    Monitor,
    MonitorConfig,
    Tracker,
    TrackerConfig,
    monitors,
    trackers,
)
from .engine.optim.tables import OptimizerConfig, ScheduleConfig, optimizers, schedules
from .engine.parallel.strategies import Strategy, strategies
from .engine.recipe.tables import register_table
from .engine.sources.configs import (
    DocumentSource,
    FileSource,
    RecordSource,
    SourceConfig,
    sources,
)
from .engine.sources.documents import Document, DocumentFault, Record
from .engine.sources.plugin_datasets import DatasetSource, MapDataset
from .engine.tasks.metrics.tables import MetricConfig, Outputs, metrics
from .engine.tasks.supervised.config import Supervised
from .engine.tasks.tables import LossConfig, TaskConfig, losses, tasks
from .engine.tokenizers.configs import TokenizerConfig, tokenizers
from .engine.tokenizers.tokenizer import MaskedDocument
from .kernels.registry import kernels
from .model_zoo.config import ModelConfig
from .model_zoo.layout import Layout

if TYPE_CHECKING:
    from .engine.tasks.criteria import Criterion, Elementwise
    from .engine.tasks.metrics.meters import MeanMeters
    from .kernels.ragged.lengths import SampleLengths
    from .kernels.ragged.samples import (
        last_of_sample,
        pad_samples,
        positions_in_samples,
        repeat_for_positions,
        sum_by_sample,
    )
    from .model_zoo.base import Constant, Model, Normal
    from .model_zoo.language_model import LanguageModel

MarkedText = MaskedDocument  # the name of versions before 0.1

__all__ = [
    "CheckpointError",
    "CheckpointMode",
    "Component",
    "CompressionConfig",
    "Constant",
    "Count",
    "CountOrZero",
    "Criterion",
    "DataError",
    "DatasetSource",
    "Document",
    "DocumentFault",
    "DocumentSource",
    "DropoutConfig",
    "Elementwise",
    "EnvironmentFault",
    "FileSource",
    "LanguageModel",
    "Layout",
    "LocalPath",
    "LossConfig",
    "MapDataset",
    "MarkedText",
    "MaskedDocument",
    "MeanMeters",
    "MergeConfig",
    "MetricConfig",
    "Model",
    "ModelConfig",
    "Monitor",
    "MonitorConfig",
    "Normal",
    "OptimizerConfig",
    "Outputs",
    "Problem",
    "RecipeError",
    "RecipePath",
    "Record",
    "RecordSource",
    "Registry",
    "SampleLengths",
    "ScheduleConfig",
    "ServerOptimizerConfig",
    "SourceConfig",
    "Strategy",
    "Supervised",
    "Table",
    "TaskConfig",
    "TokenSource",
    "TokenizerConfig",
    "Tracker",
    "TrackerConfig",
    "TrainerError",
    "checkpoint_modes",
    "compressions",
    "dropouts",
    "kernels",
    "last_of_sample",
    "losses",
    "merges",
    "metrics",
    "models",
    "monitors",
    "optimizers",
    "pad_samples",
    "positions_in_samples",
    "register_table",
    "repeat_for_positions",
    "schedules",
    "server_optimizers",
    "sources",
    "strategies",
    "sum_by_sample",
    "tasks",
    "tokenizers",
    "trackers",
]
_OF_TORCH = {
    **dict.fromkeys(("Constant", "Model", "Normal"), ".model_zoo.base"),
    "LanguageModel": ".model_zoo.language_model",
    **dict.fromkeys(("Criterion", "Elementwise"), ".engine.tasks.criteria"),
    "MeanMeters": ".engine.tasks.metrics.meters",
    "SampleLengths": ".kernels.ragged.lengths",
    **dict.fromkeys(
        (
            "last_of_sample",
            "pad_samples",
            "positions_in_samples",
            "repeat_for_positions",
            "sum_by_sample",
        ),
        ".kernels.ragged.samples",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in _OF_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OF_TORCH[name], __package__), name)
