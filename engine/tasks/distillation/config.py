"""The table of distillation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ...core.config import CountOrZero
from ...core.errors import Problem, RecipeError
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
    top_k: CountOrZero = 0
    """learn from so many of the teacher's likeliest tokens at each position, and from all others
    together; 0: from each token of the vocabulary"""

    def frozen_model(self, loss: LossConfig) -> str | None:
        """Return the place of the teacher."""
        return self.teacher

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return distillation."""
        from dataclasses import replace

        from ..language_modeling.next_token import find_token_bytes
        from .distill import Distill

        vocab = settings.model.vocab
        if self.top_k > vocab:
            message = f"is {self.top_k}, and the model has {vocab} tokens"
            raise RecipeError([Problem(message, "task.top_k", hint="0 is all of them")])
        criterion = replace(settings.loss.build(settings.kernels), top_k=self.top_k)
        return Distill(
            loss=criterion,
            compute=criterion.compute,
            data=settings.data,
            frozen=settings.frozen,
            token_bytes=find_token_bytes(settings.tokenizer),
        )
