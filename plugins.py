"""What a plugin builds on: each registry, and the base class of the tables registered in it.

These names stay where they are; other modules may move between versions. Torch-free.
"""

from __future__ import annotations

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
from .engine.loss.tables import LossConfig, losses
from .engine.observe.tables import Tracker, TrackerConfig, trackers
from .engine.optim.tables import OptimizerConfig, ScheduleConfig, optimizers, schedules
from .engine.parallel.strategies import Strategy, strategies
from .engine.recipe.tables import register_table
from .engine.sources.configs import DocumentSource, FileSource, SourceConfig, sources
from .engine.sources.documents import Document, DocumentFault
from .engine.tokenizers.configs import TokenizerConfig, tokenizers
from .engine.tokenizers.tokenizer import MaskedDocument
from .kernels.registry import kernels
from .model_zoo.config import ModelConfig

MarkedText = MaskedDocument  # the name of versions before 0.1

__all__ = [
    "CheckpointError",
    "CheckpointMode",
    "Component",
    "Count",
    "CountOrZero",
    "DataError",
    "Document",
    "DocumentFault",
    "DocumentSource",
    "EnvironmentFault",
    "FileSource",
    "LocalPath",
    "LossConfig",
    "MarkedText",
    "MaskedDocument",
    "ModelConfig",
    "OptimizerConfig",
    "Problem",
    "RecipeError",
    "RecipePath",
    "Registry",
    "ScheduleConfig",
    "SourceConfig",
    "Strategy",
    "Table",
    "TokenSource",
    "TokenizerConfig",
    "Tracker",
    "TrackerConfig",
    "TrainerError",
    "checkpoint_modes",
    "kernels",
    "losses",
    "models",
    "optimizers",
    "register_table",
    "schedules",
    "sources",
    "strategies",
    "tokenizers",
    "trackers",
]
