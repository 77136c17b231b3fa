"""The recipe's `[checkpoint]` table. Torch-free."""

from __future__ import annotations

from typing import Literal

from ..core.config import Count, CountOrZero, Table


class Checkpoint(Table):
    """When state is saved and how much is kept."""

    interval: CountOrZero = 100
    """optimizer steps between checkpoints; 0: only at the end"""
    keep: Count = 2
    """how many of the newest are kept"""
    mode: Literal["sync", "async", "async_pinned"] = "async"
    """"async" copies the state and writes while training goes on; "async_pinned" copies through
    pinned memory on a GPU"""
    last: Literal["full", "weights"] = "full"
    """what the final checkpoint holds"""
    keep_best: bool = False
    """also keep the checkpoint with the best `evaluate.metric`, under the alias checkpoints/best"""
    export: Literal["none", "hf"] = "none"
    """"hf": at the end also write {dir}/{name}/hf, a folder that transformers loads"""
