"""The recipe's `[checkpoint]` table, and the registry of its modes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from ..core.config import Component, Count, CountOrZero, OneOf, Table
from ..core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Allocate = Callable[["Tensor"], "Tensor"]
"""returns memory on the CPU for a copy of a tensor, of the same shape and dtype"""


class CheckpointMode(Component):
    """How a save takes the state, so that training can continue while it is written."""

    def build(self) -> Allocate | None:
        """Return what allocates the memory for copies, or None to write the state itself.

        With copies, a save continues in a thread while training does; the memory is used again
        by the next save. Without, training waits until the checkpoint is complete.
        """
        raise NotImplementedError


checkpoint_modes: Registry[CheckpointMode] = Registry(
    "checkpoint_mode",
    default="async",
    built_in={
        "sync": "engine.checkpoint.modes:Sync",
        "async": "engine.checkpoint.modes:Async",
        "async_pinned": "engine.checkpoint.modes:AsyncPinned",
    },
)


class Checkpoint(Table):
    """When state is saved and how much is kept."""

    interval: CountOrZero = 100
    """optimizer steps between checkpoints; 0: only at the end"""
    interval_epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """epochs between checkpoints, in place of interval"""
    keep: Count = 2
    """how many of the newest are kept; the best and the one that run.resume names are kept too"""
    keep_every: CountOrZero = 0
    """also keep each checkpoint whose step is a multiple of it, a multiple of interval; 0: none"""
    mode: Annotated[str, OneOf(checkpoint_modes)] = "async"
    """"sync": training waits for the disk; "async": the state is copied and written while training
    continues; "async_pinned": copied through page-locked memory of a GPU's host"""
    last: Literal["full", "weights"] = "full"
    """what the final checkpoint holds"""
    keep_best: bool = False
    """also keep the checkpoint with the best `evaluate.metric`, under the alias checkpoints/best"""
    export: Literal["none", "hf"] = "none"
    """"hf": at the end also write hf/ in the run directory, a folder that transformers loads"""
    export_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """dtype of the weights in that folder; left out: the dtype in which they are trained"""

    @model_validator(mode="after")
    def _require_saved_milestones(self) -> Self:
        if self.keep_every and self.interval_epochs is not None:
            raise ValueError("keep_every counts steps: give interval in place of interval_epochs")
        if self.keep_every and (not self.interval or self.keep_every % self.interval):
            raise ValueError(
                f"keep_every ({self.keep_every}) is no multiple of checkpoint.interval "
                f"({self.interval}), so the step would not be saved"
            )
        return self
