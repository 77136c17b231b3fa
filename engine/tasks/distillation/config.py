"""The table of distillation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..language_modeling.config import LanguageModeling
from ..tables import LossConfig

if TYPE_CHECKING:
    from ..tables import TaskSettings
    from ..task import Task


class Distillation(LanguageModeling):
    """Learn the next-token distributions of a teacher with the same tokenizer."""

    frozen_key: ClassVar[str] = "teacher"
    losses: ClassVar[tuple[str, ...]] = ("forward_kl", "reverse_kl", "jensen_shannon")
    scores: ClassVar[Mapping[str, bool]] = dict.fromkeys(
        ("loss", "divergence", "cross_entropy", "perplexity"), False
    )

    name: Literal["distillation"] = "distillation"  # type: ignore[assignment]
    teacher: str
    """a run, one of its checkpoints, or a Hugging Face folder; frozen, and not saved"""

    def frozen_model(self, loss: LossConfig) -> str | None:
        """Return the place of the teacher."""
        return self.teacher

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return distillation."""
        from ..language_modeling.next_token import find_token_bytes
        from .distill import Distill

        criterion = settings.loss.build(settings.kernels)
        return Distill(
            loss=criterion,
            compute=criterion.compute,
            data=settings.data,
            frozen=settings.frozen,
            token_bytes=find_token_bytes(settings.tokenizer),
        )
