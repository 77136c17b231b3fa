"""The recipe's `[metrics]` and `[profile]` tables. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..core.config import Count, CountOrZero, Table
from ..core.registry import Named
from . import configs


class Profile(Table):
    """Where the time and the memory of some steps go."""

    steps: CountOrZero = 0
    """how many optimizer steps are profiled; 0: none"""
    start: Count = 10
    """the first of them, counted from where this attempt starts"""
    memory: bool = False
    """also record every allocation: a memory snapshot on a GPU, a memory column on a CPU"""
    ranks: Annotated[list[CountOrZero], Field(min_length=1, max_length=1024)] = [0]
    """which ranks write traces to {dir}/{name}/profiles"""


class Metrics(Table):
    """What is measured and where it goes."""

    interval: Count = 10
    """optimizer steps between rows of metrics.jsonl"""
    tensorboard: bool = False
    """also write TensorBoard event files (extra `[tensorboard]`)"""
    trackers: list[Annotated[configs.TrackerConfig, Named(configs.trackers)]] = []
    """more places that get every row"""
