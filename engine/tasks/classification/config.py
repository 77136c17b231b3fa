"""The tables of classification and question answering. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ....model_zoo.heads import HeadSettings, Problem
from ...core.config import Count
from ..metrics.tables import Outputs
from ..tables import LossConfig, TaskConfig, TaskData, TaskSettings

if TYPE_CHECKING:
    from ....model_zoo.config import ModelConfig
    from ...corpus.records.encode_records import RecordEncoding
    from ...data.collate import Collation
    from ...data.dataset import OpenedData
    from ...tokenizers.tokenizer import Tokenizer
    from ..task import Task

DEFAULT_LOSSES: Mapping[str, str] = {"single": "cross_entropy", "multi": "bce", "regression": "mse"}
Labels = Annotated[list[str], Field(max_length=2**20)]
Dropout = Annotated[float, Field(ge=0, lt=1)]


class HeadTask(TaskConfig):
    """Base of tasks that put a head of their own on a language model."""

    packings: ClassVar[tuple[str, ...]] = ("none", "ragged")

    dropout: Dropout = 0.0
    """share of the final hidden states that training sets to zero before the head"""

    def head(self) -> HeadSettings:
        """Return the head that the task trains."""
        raise NotImplementedError

    def adapt_model(self, config: ModelConfig) -> ModelConfig:
        """Return the config of the model with the task's head."""
        return config.with_head(self.head())

    def build_collation(
        self, tokenizer: Tokenizer, loss: LossConfig | None, ragged: bool = False
    ) -> Collation:
        """Return how texts become batches."""
        from .batch import make_collation

        return make_collation(self.name, tokenizer.eos_id, ragged=ragged)

    def build_data(self, data: TaskData) -> OpenedData:
        """Open, or encode once, every source, and hold records out for validation."""
        from ...data.records import RecordOpener

        encoding = self.build_encoding(data.tokenizer)
        collation = self.build_collation(data.tokenizer, data.loss, data.table.packing == "ragged")
        collation = replace(collation, seed=data.seed if self.dropout else None)
        opener = RecordOpener(data.table, data.tokenizer, collation, encoding, data.share)
        return opener.open_data(data.seed)

    def build(self, settings: TaskSettings) -> Task[Any]:
        """Return the task."""
        from .task import TASKS

        return TASKS[self.name](
            loss=settings.loss.build_criterion(),
            data=settings.data,
            head=self.head(),
            **self.settings(settings.tokenizer),
        )

    def settings(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return the further fields of the task's class."""
        return {}


class SequenceClassification(HeadTask):
    """Classify texts: one class, several, or numbers for each; the last token decides."""

    losses: ClassVar[tuple[str, ...]] = ("cross_entropy", "bce", "mse", "l1", "huber")
    fields: ClassVar[tuple[str, ...]] = ("text", "label")

    name: Literal["sequence_classification"] = "sequence_classification"
    labels: Labels = []
    """names of the classes, in the order of the model's outputs"""
    problem: Problem = "single"
    """"single": a text has one class; "multi": any number of them; "regression": numbers"""
    targets: Count = 1
    """numbers of a regression for each text"""

    @classmethod
    def default_loss(cls, table: Mapping[str, Any]) -> str:
        """Return the loss of the problem."""
        return DEFAULT_LOSSES.get(str(table.get("problem", "single")), "cross_entropy")

    @property
    def accepted_losses(self) -> tuple[str, ...]:
        """The names of the losses for the problem."""
        fitting = {"single": ("cross_entropy",), "multi": ("bce",)}
        return fitting.get(self.problem, ("mse", "l1", "huber"))

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        require_labels(self.labels, 0 if self.problem == "regression" else 2 - self.is_multi)
        if self.problem == "regression" and self.labels:
            raise ValueError("a regression has no labels; targets says how many numbers it has")
        return self

    @property
    def is_multi(self) -> bool:
        """Whether a text has any number of classes."""
        return self.problem == "multi"

    def outputs(self, loss: LossConfig) -> Outputs | None:
        """Return classes, labels or numbers."""
        if self.problem == "regression":
            return Outputs("regression", self.targets)
        if self.is_multi and len(self.labels) == 1:
            return Outputs("binary")
        kind: Literal["multilabel", "multiclass"] = "multilabel" if self.is_multi else "multiclass"
        return Outputs(kind, len(self.labels), self.labels)

    def head(self) -> HeadSettings:
        """Return a layer without bias, as transformers' models have it."""
        return HeadSettings(
            kind="sequence_classification",
            outputs=len(self.labels) or self.targets,
            dropout=self.dropout,
            labels=tuple(self.labels),
            problem=self.problem,
        )

    def build_encoding(self, tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
        """Return the encoding of labelled texts."""
        from ..encode_texts import make_classification_encoding

        return make_classification_encoding(
            tokenizer, self.labels, self.problem, self.targets, is_labelled=is_labelled
        )


class TokenClassification(HeadTask):
    """Classify words; the first token of each decides."""

    fields: ClassVar[tuple[str, ...]] = ("tokens", "labels")

    name: Literal["token_classification"] = "token_classification"
    labels: Labels
    """names of the classes, in the order of the model's outputs"""

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        require_labels(self.labels, 2)
        return self

    def outputs(self, loss: LossConfig) -> Outputs | None:
        """Return the classes of words."""
        return Outputs("multiclass", len(self.labels), self.labels)

    def head(self) -> HeadSettings:
        """Return a layer with bias, as transformers' models have it."""
        return HeadSettings(
            kind="token_classification",
            outputs=len(self.labels),
            bias=True,
            dropout=self.dropout,
            labels=tuple(self.labels),
        )

    def build_encoding(self, tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
        """Return the encoding of labelled words."""
        from ..encode_texts import make_token_encoding

        return make_token_encoding(tokenizer, self.labels, is_labelled=is_labelled)

    def build_prediction(
        self, prediction: Mapping[str, Any], values: Mapping[str, Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the name of the class of each word; null for an empty word, or one cut off."""
        from ..encode_texts import select_words

        classes = select_words(values, prediction["classes"], tokenizer)
        names = [None if number is None else self.labels[number] for number in classes]
        return {"labels": names}


class QuestionAnswering(HeadTask):
    """Find the answer to a question in a text: the first and the last token of it."""

    axes: ClassVar[tuple[str, ...]] = ("tensor", "pipeline", "expert", "expert_tensor")
    fields: ClassVar[tuple[str, ...]] = ("question", "context", "answers")

    name: Literal["question_answering"] = "question_answering"
    max_answer_tokens: Count = 30
    """tokens of the longest answer that `trainer infer` gives and metrics measure"""

    def settings(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return the length of the longest answer, and what decodes it."""
        return {"max_answer_tokens": self.max_answer_tokens, "tokenizer": tokenizer}

    def outputs(self, loss: LossConfig) -> Outputs | None:
        """Return the texts of answers."""
        return Outputs("answer")

    def head(self) -> HeadSettings:
        """Return a layer of two outputs with bias, as transformers' models have it."""
        return HeadSettings(kind="question_answering", outputs=2, bias=True, dropout=self.dropout)

    def build_encoding(self, tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
        """Return the encoding of questions and texts."""
        from ..encode_answers import make_question_encoding

        return make_question_encoding(tokenizer, is_labelled=is_labelled)

    def build_prediction(
        self, prediction: Mapping[str, Any], values: Mapping[str, Any], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return the text of the answer, and which characters of the context it is."""
        from ..encode_answers import locate_answer

        return {
            **locate_answer(values, prediction["span"], tokenizer),
            "score": prediction["score"],
        }


def require_labels(labels: Sequence[str], least: int) -> None:
    """Raise a ValueError if names of classes are missing or given twice."""
    if len(labels) < least:
        raise ValueError(f"labels needs the names of at least {least} classes")
    if twice := sorted({name for name in labels if labels.count(name) > 1}):
        raise ValueError(f"labels names {twice[0]!r} twice")


def table_of_head(head: HeadSettings) -> dict[str, Any]:
    """Return the `[task]` table of a task that trains a head, such as that of a folder's model."""
    table: dict[str, Any] = {"name": head.kind, "dropout": head.dropout}
    names = list(head.labels) or [f"LABEL_{number}" for number in range(head.outputs)]
    if head.kind == "token_classification":
        return {**table, "labels": names}
    if head.kind == "question_answering":
        return table
    if head.problem == "regression":
        return {**table, "problem": head.problem, "targets": head.outputs}
    return {**table, "problem": head.problem, "labels": names}
