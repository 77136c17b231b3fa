"""How far a run has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .best import Best

if TYPE_CHECKING:
    from torch import Tensor


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
