"""Classification of texts and words, and extractive question answering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....kernels.ragged.lengths import SampleLengths
from ....kernels.ragged.samples import last_of_sample, pad_samples
from ....model_zoo.heads import HeadSettings
from ...data.batch import IGNORED, Batch
from ...tokenizers.tokenizer import Tokenizer
from ..criteria import Fields
from ..dropout import find_dropout_keys
from ..encode_answers import decode_answer_texts
from ..metrics.tables import Outputs
from ..outputs import KeptOutputs
from ..predictions import find_spans, name_classes
from ..sample_task import CriterionRecord, CriterionTask
from ..task import LossRecord
from .batch import RaggedTexts, TextBatch, WordBatch


@dataclass(frozen=True, kw_only=True)
class TextTask(CriterionTask[TextBatch]):
    """A task of texts, whose model has a head of its own.

    Attributes:
        head: the head of the model.
    """

    head: HeadSettings

    batch_class: ClassVar[type[Batch]] = TextBatch

    def input(self, batch: TextBatch) -> Tensor:
        """Return the tokens, [B, S]."""
        return batch.tokens

    def arguments(self, batch: TextBatch) -> dict[str, Any]:
        """Return positions and, if there are such, padding mask, lengths, and keys of dropout."""
        given: dict[str, Any] = {"positions": batch.positions}
        if batch.padding_mask is not None:
            given["padding_mask"] = batch.padding_mask
        if batch.ragged:
            given["lengths"] = batch.ragged
        return given | find_dropout_keys(batch.sample_keys, batch.position_of_each, batch.ragged)

    def flops_per_unit(self, flops_per_token: float) -> float:
        """Return the FLOPs of a text as long as a row."""
        return flops_per_token * self.data.seq_len

    def num_samples(self, batch: TextBatch) -> Tensor:
        """Return how many texts end on this rank and do not only fill up a batch."""
        return _counts_here(batch).sum()

    def fields(self, batch: TextBatch) -> Fields:
        """Return the labels of the texts that end on this rank; others are left out by value."""
        if batch.labels is None:
            return {}
        here = _counts_here(batch)
        if batch.labels.is_floating_point():
            return {"labels": torch.where(here.unsqueeze(1), batch.labels, torch.nan)}
        return {"labels": torch.where(here, batch.labels, IGNORED)}

    def record(self, batch: TextBatch) -> CriterionRecord:
        """Return the criterion of the outputs at the last token of each text."""
        return CriterionRecord(self.loss, self.fields(batch), lambda x: _last_outputs(x, batch))

    def predict(
        self, batch: TextBatch, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return the classes or numbers of each text, with probabilities."""
        assert isinstance(record, KeptOutputs), "output_record returns one"
        return name_classes(_last_outputs(record.outputs, batch), meaning)

    def example(self, rows: int) -> TextBatch:
        """Return texts of token 0, as long as a row."""
        shape = rows, self.data.seq_len
        if self.data.packing == "ragged":
            lengths = torch.full((rows,), shape[1])
            tokens = torch.zeros(1, rows * shape[1], dtype=torch.int64)
            labels = self._empty_labels(shape)
            if self.batch_class is WordBatch:  # a label for each token
                labels = labels.view(1, -1)
            # From numbers of the host: a simulation has no values in tensors.
            row_lengths = SampleLengths([shape[1]] * rows)
            return RaggedTexts(tokens, lengths, labels, positions=tokens, row_lengths=row_lengths)
        return self._example(shape, self._empty_labels(shape))

    def _empty_labels(self, shape: tuple[int, int]) -> Tensor:
        if self.head.problem == "single":
            return torch.zeros(shape[0], dtype=torch.int64)
        return torch.zeros(shape[0], self.head.outputs)

    def _example(self, shape: tuple[int, int], labels: Tensor) -> TextBatch:
        tokens = torch.zeros(shape, dtype=torch.int64)
        lengths = torch.full((shape[0],), shape[1])
        padding = torch.zeros(shape, dtype=torch.bool)
        batch: TextBatch = self.batch_class(tokens, lengths, labels, padding)  # type: ignore[call-arg, assignment] # its own class
        return batch


@dataclass(frozen=True, kw_only=True)
class WordTask(TextTask):
    """Classification of tokens."""

    batch_class: ClassVar[type[Batch]] = WordBatch

    def fields(self, batch: TextBatch) -> Fields:
        """Return the labels of tokens."""
        return {} if batch.labels is None else {"labels": batch.labels}

    def record(self, batch: TextBatch) -> CriterionRecord:
        """Return the criterion of all outputs."""
        return CriterionRecord(self.loss, self.fields(batch))

    def predict(
        self, batch: TextBatch, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return the number of the likeliest class of each token, as `classes`."""
        assert isinstance(record, KeptOutputs), "output_record returns one"
        rows = zip(record.outputs.argmax(-1).tolist(), batch.lengths.tolist(), strict=True)
        return [{"classes": classes[:length]} for classes, length in rows]

    def _empty_labels(self, shape: tuple[int, int]) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class AnswerTask(TextTask):
    """Question answering: cross entropy over the positions of the first and of the last token.

    Attributes:
        max_answer_tokens: the longest answer that is predicted.
        tokenizer: decodes answers, for metrics; None: there are no metrics.
    """

    max_answer_tokens: int
    tokenizer: Tokenizer | None = None

    def fields(self, batch: TextBatch) -> Fields:
        """Return the two ends of each answer as classes, [B, 2]."""
        if batch.labels is None:
            return {}
        here = _counts_here(batch).unsqueeze(1)
        return {"labels": torch.where(here, batch.labels, IGNORED)}

    def predict(
        self, batch: TextBatch, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return the likeliest answer of each context: `span`, its tokens, and `score`."""
        assert isinstance(record, KeptOutputs), "output_record returns one"
        assert batch.context_start is not None, "questions have contexts"
        places = batch.context_start, batch.lengths
        return find_spans(record.outputs, *places, self.max_answer_tokens)

    def record(self, batch: TextBatch) -> SpanRecord:
        """Return the criterion of scores of positions, [B, 2, S]; padding is no answer."""
        if lengths := batch.ragged:

            def pad_scores(x: Tensor) -> Tensor:
                return pad_samples(x[0], lengths, -torch.inf).transpose(1, 2)

            return SpanRecord(self, batch, pad_scores)
        is_padding = batch.position_of_each >= batch.lengths.unsqueeze(1)

        def score_positions(x: Tensor) -> Tensor:
            return x.transpose(1, 2).masked_fill(is_padding.unsqueeze(1), -torch.inf)

        return SpanRecord(self, batch, score_positions)

    def _empty_labels(self, shape: tuple[int, int]) -> Tensor:
        return torch.zeros(shape[0], 2, dtype=torch.int64)


class SpanRecord(CriterionRecord):
    """The criterion of both ends of answers, which knows the texts of answers.

    Args:
        task: the task.
        batch: questions, whose `answers` are there if metrics ask for texts.
        select: maps the outputs of the model to scores of positions, [B, 2, S].
    """

    def __init__(self, task: AnswerTask, batch: TextBatch, select: Callable[[Any], Any]) -> None:
        super().__init__(task.loss, task.fields(batch), select)
        self._task = task
        self._batch = batch

    def predictions(self) -> tuple[list[str | None], list[list[str]]] | None:
        """Return the likeliest answer of each question, and all answers that are right.

        The text of an answer is that of its tokens, "" if none is likelier. It is None for outputs
        that are NaN.
        """
        batch, tokenizer = self._batch, self._task.tokenizer
        if batch.answers is None or batch.context_start is None or tokenizer is None:
            return None
        scores = self.outputs.transpose(1, 2)
        is_nan = scores.isnan().flatten(1).any(1).tolist()
        spans = find_spans(scores, batch.context_start, batch.lengths, self._task.max_answer_tokens)
        tokens = pad_samples(batch.tokens[0], batch.ragged) if batch.ragged else batch.tokens
        rows = zip(
            _counts_here(batch).tolist(),
            is_nan,
            spans,
            tokens.tolist(),
            batch.answers.cpu().numpy(),
            strict=True,
        )
        texts: list[str | None] = []
        answers = []
        for is_counted, has_nan, found, ids, codes in rows:
            if is_counted:
                first, last = found["span"] or (0, -1)
                text = tokenizer.decode(ids[first : last + 1]).strip()
                texts.append(None if has_nan else text)
                answers.append(decode_answer_texts(codes.tobytes()))
        return texts, answers


TASKS: dict[str, type[TextTask]] = {
    "sequence_classification": TextTask,
    "token_classification": WordTask,
    "question_answering": AnswerTask,
}


def _is_last(batch: TextBatch) -> Tensor:
    """Return where each text has its last token, [B, S]; nowhere if another rank has it."""
    return batch.position_of_each == batch.lengths.unsqueeze(1) - 1


def _counts_here(batch: TextBatch) -> Tensor:
    """Return which texts end on this rank and do not only fill up a batch, [B]."""
    if batch.ragged:
        here = torch.ones_like(batch.lengths, dtype=torch.bool)
    else:
        here = _is_last(batch).any(1)
    return here if batch.is_valid is None else here & batch.is_valid


def _last_outputs(outputs: Tensor, batch: TextBatch) -> Tensor:
    """Return the outputs at the last token of each text, [B, C], of [B, S, C].

    Of a text that ends on another rank they are those of any position.
    """
    if batch.ragged:
        return last_of_sample(outputs[0], batch.ragged)
    # No selection by mask: the host would wait to learn how many texts there are.
    place = _is_last(batch).int().argmax(1)
    return outputs.gather(1, place.view(-1, 1, 1).expand(-1, 1, outputs.shape[-1])).squeeze(1)
