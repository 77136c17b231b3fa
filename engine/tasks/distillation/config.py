"""The table of distillation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from ...core.config import CountOrZero, LocalPath
from ...core.errors import Problem, RecipeError
from ..language_modeling.config import LanguageModeling
from ..precomputed import PrecomputedOutputs
from ..tables import LossConfig

if TYPE_CHECKING:
    from ..tables import TaskSettings
    from ..task import Task

PRECOMPUTED_TOP_K = 64


class Distillation(LanguageModeling):
    """Learn the next-token distributions of a teacher with the same tokenizer."""

    frozen_key: ClassVar[str] = "teacher"
    needs_frozen: ClassVar[bool] = True
    losses: ClassVar[tuple[str, ...]] = ("forward_kl", "reverse_kl", "jensen_shannon")
    scores: ClassVar[Mapping[str, bool]] = dict.fromkeys(
        ("loss", "divergence", "cross_entropy", "perplexity"), False
    )

    name: Literal["distillation"] = "distillation"  # type: ignore[assignment]
    teacher: str = ""
    """a run, one of its checkpoints, or a Hugging Face folder; frozen, and not saved; may be left
    out with `precomputed`"""
    top_k: CountOrZero = 0
    """learn from so many of the teacher's likeliest tokens at each position, and from all others
    together; 0: from each token of the vocabulary; default: 64 with `precomputed`, else 0"""
    precomputed: LocalPath = ""
    """folder of the teacher's likeliest tokens, which `trainer precompute` writes: the teacher
    itself is then not opened"""

    @model_validator(mode="before")
    @classmethod
    def _limit_tokens(cls, values: Any) -> Any:
        """Keep some tokens a position on disk: all of them are some GB for a million."""
        if isinstance(values, dict) and values.get("precomputed"):
            return {"top_k": PRECOMPUTED_TOP_K, **values}
        return values

    def frozen_model(self, loss: LossConfig) -> str | None:
        """Return the place of the teacher; None with `precomputed`."""
        return None if self.precomputed else self.teacher

    def find_outputs(self, loss: LossConfig) -> PrecomputedOutputs | None:
        """Return the teacher's likeliest tokens on disk."""
        if not self.precomputed:
            return None
        temperature = getattr(loss, "temperature", None)
        settings = {"task.top_k": self.top_k, "loss.temperature": temperature}
        return PrecomputedOutputs(self.precomputed, settings)

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
            is_precomputed=bool(self.precomputed),
        )
