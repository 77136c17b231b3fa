"""Next-token prediction: the loss and the numbers of a language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....kernels.ragged.lengths import SampleLengths
from ....kernels.ragged.samples import sum_by_sample
from ....kernels.summation import widen
from ....kernels.vocabulary import WHOLE, VocabularyShard, project
from ...data.batch import IGNORED, Batch, TokenBatch
from ...observe.numbers import Mean, Number
from ...tokenizers.tokenizer import Tokenizer
from ..metrics.tables import Outputs
from ..task import LossRecord, Task
from .token_scores import TokenScores

ROWS = 1024
"""positions whose logits are held at once to find the most probable tokens"""


class TokenLossRecord(LossRecord):
    """A loss function for one forward pass that keeps the loss of each token.

    A model calls it for the labels first. Later calls are for what the model learns besides, such
    as multi-token prediction: they are minimised, and no part of the task's loss.

    Args:
        loss: see `NextToken`.
        sources: [B], from which source each row is; None: all are from one.
        num_sources: number of sources whose losses are reported apart.
        lengths: tokens of each row of a flat row; None: rows have one length.
        vocabulary: the tokens of this rank, to find the most probable ones; None: not asked for.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        sources: Tensor | None = None,
        num_sources: int = 0,
        lengths: SampleLengths | None = None,
        vocabulary: VocabularyShard | None = None,
    ) -> None:
        self._loss = loss
        self._vocabulary = vocabulary
        self._predictions: tuple[Tensor, Tensor] | None = None
        self._sources = sources
        self._num_sources = num_sources
        self._lengths = lengths
        self._token_losses: list[Tensor] = []

    def __call__(self, *outputs: Any, softcap: float | None = None) -> Tensor:
        """Return the sum that is minimised, from hidden states, head weight and labels."""
        settings = {} if softcap is None else {"softcap": softcap}
        if self._token_losses:
            return self._loss(*outputs, **settings)
        if self._vocabulary is not None:
            hidden, weight, labels = outputs
            self._predictions = predict_tokens(hidden, weight, self._vocabulary), labels
        return self._loss(*outputs, token_losses=self._token_losses, **settings)

    def sums(self, minimized: Tensor) -> Tensor:
        """Return the sum that is minimised, the task's loss, and that of each source."""
        # As the kernel sums: without regularisers both are the same to the bit.
        task = torch.stack([each.sum() for each in self._token_losses]).sum()
        sums = torch.stack([minimized.detach(), task])
        if self._sources is None or not self._num_sources:
            return sums
        rows = _sum_rows(torch.cat(self._token_losses), len(self._sources), self._lengths)
        return torch.cat([sums, sum_by_source(rows, self._sources, self._num_sources)])

    def predictions(self) -> tuple[Tensor, Tensor] | None:
        """Return the most probable token at each position, [T], and the labels, [T]."""
        return self._predictions


@torch.no_grad()
def predict_tokens(hidden: Tensor, weight: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Return the most probable token at each position, without holding all logits.

    A cap of the logits changes no order, and is left out.

    Args:
        hidden: [T, D].
        weight: the head's weight of this rank's tokens, [V, D].
        vocabulary: which tokens these are; all ranks that share them call it.

    Returns:
        tokens, [T] int64.
    """
    weight = weight.to(hidden.dtype)
    rows = (project(chunk, weight, 1.0) for chunk in torch.split(hidden, ROWS))
    return torch.cat([vocabulary.top_k(logits, 1)[1].squeeze(1) for logits in rows])


def _sum_rows(values: Tensor, rows: int, lengths: SampleLengths | None) -> Tensor:
    """Return the sum of each row, [B]; `lengths` are those of a flat row."""
    if lengths is not None:
        return sum_by_sample(values.flatten(), lengths)
    return values.view(rows, -1).sum(1)


def sum_by_source(rows: Tensor, sources: Tensor, num_sources: int) -> Tensor:
    """Return the sum of each source's rows; what is not finite stays in its own source."""
    # Not a product with the mask: 0 times NaN is NaN, and would reach every source.
    mine = sources == torch.arange(num_sources, device=sources.device).unsqueeze(1)
    return torch.where(mine, rows, 0).sum(1)


@dataclass(frozen=True, kw_only=True)
class NextToken(Task[TokenBatch]):
    """Predicts the next token; the loss is a mean over the labels that count.

    Sums are the minimised loss, the task's loss, and that of each source; counts are the labels
    that are trained on, and those of each source.

    Attributes:
        loss: (hidden [T, D], head weight [V, D], labels [T], -100 ignored) -> the sum over tokens
            that is minimised, fp32. Given a list as `token_losses`, it appends the task's loss of
            each token to it, without regularisers and without gradient: [T], in one piece or
            several. `softcap` caps the logits; it is given where a model does so.
        token_bytes: bytes of text that each token stands for, [V] int64; None if unknown.
        vocabulary: the tokens whose logits this rank computes.
    """

    token_bytes: Tensor | None = None
    vocabulary: VocabularyShard = WHOLE

    batch_class: ClassVar[type[Batch]] = TokenBatch
    unit: ClassVar[str] = "tokens"

    @property
    def num_sums(self) -> int:
        """The minimised sum, the task's, and those of the sources."""
        return 2 + len(self.sources)

    def counts(self, batch: TokenBatch) -> Tensor:
        """Count the labels that are trained on: all, then of each source, int64."""
        counted = batch.labels != IGNORED
        tokens = counted.sum().view(1)
        if batch.sources is None or not self.sources:
            return tokens
        rows = _sum_rows(counted, len(batch), batch.row_lengths)
        return torch.cat([tokens, sum_by_source(rows, batch.sources, len(self.sources))])

    def factors(self, counts: Tensor, scale: float) -> Tensor:
        """Divide by the labels that are trained on."""
        return scale / counts[0].clamp(min=1)

    def input(self, batch: TokenBatch) -> Tensor:
        """Return the tokens, [B, S]."""
        return batch.tokens

    def arguments(self, batch: TokenBatch) -> dict[str, Any]:
        """Return positions, document ids or lengths, and what else there is."""
        columns: dict[str, Any] = {"positions": batch.positions, "document_ids": batch.document_ids}
        if batch.row_lengths is not None:
            columns = {"positions": batch.positions, "lengths": batch.row_lengths}
        # Only what there is: a plugin's model need not know all.
        given = {
            "max_documents": batch.max_documents,
            "padding_mask": batch.padding_mask,
            "dropout_keys": batch.dropout_keys,
        }
        return {**columns, **{k: v for k, v in given.items() if v is not None}}

    def loss_arguments(self, batch: TokenBatch, record: LossRecord) -> dict[str, Any]:
        """Return the labels, which a model may learn more from than the task's loss."""
        return {"labels": batch.labels, "loss": record}

    def record(self, batch: TokenBatch) -> LossRecord:
        """Return the loss of each token."""
        return TokenLossRecord(
            self.loss,
            batch.sources,
            len(self.sources),
            batch.row_lengths,
            self.vocabulary if self.keeps_predictions else None,
        )

    def mean_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the loss without regularisers, a mean over labels."""
        return sums[1] / counts[0].clamp(min=1)

    def total_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the loss that is minimised."""
        return sums[0] / counts[0].clamp(min=1)

    def metrics(self, sums: Tensor, counts: Tensor) -> Mapping[str, Number]:
        """Return the mean loss of each source."""
        means = zip(self.sources, sums[2:].unbind(), counts[1:].unbind(), strict=True)
        return {f"loss/{name}": Mean(total, count) for name, total, count in means}

    def output_record(self, batch: TokenBatch) -> TokenScores:
        """Return what keeps the log-probability of each label."""
        return TokenScores(self.vocabulary)

    def predict(
        self, batch: TokenBatch, record: LossRecord, meaning: Outputs | None
    ) -> list[dict[str, Any]]:
        """Return loss and perplexity of each text, a mean over the tokens of the text."""
        assert isinstance(record, TokenScores), "output_record returns one"
        assert record.nll is not None, "the forward pass came before"
        totals = widen(record.nll.view(batch.labels.shape)).sum(1).tolist()
        counts = (batch.labels != IGNORED).sum(1).tolist()
        found: list[dict[str, Any]] = []
        for total, count in zip(totals, counts, strict=True):
            loss = total / max(count, 1)
            found.append({"loss": loss, "tokens": count, "perplexity": perplexity(loss)})
        return found

    def evaluation_counts(self, batch: TokenBatch) -> Tensor:
        """Return the counts of labels, and the bytes that the labels stand for."""
        counts = self.counts(batch)
        if self.token_bytes is None:
            return torch.cat([counts, counts.new_zeros(1)])
        # No selection of the labels that count: the host would wait to learn how many there are.
        sizes = self.token_bytes.to(batch.labels.device)[batch.labels.clamp(min=0)]
        num_bytes = torch.where(batch.labels == IGNORED, 0, sizes).sum()
        return torch.cat([counts, num_bytes.view(1)])

    def evaluation(self, sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
        """Return `loss`, `perplexity`, `bits_per_byte` if bytes are known, and `loss/SOURCE`.

        Bits per byte compare models of different tokenizers.
        """
        _, total, *by_source = sums
        tokens, *source_tokens, num_bytes = counts
        loss = total / max(tokens, 1)
        numbers = {"loss": loss, "perplexity": perplexity(loss)}
        if num_bytes:
            numbers["bits_per_byte"] = total / (math.log(2) * num_bytes)
        return numbers | {
            f"loss/{name}": source_total / count
            for name, source_total, count in zip(
                self.sources, by_source, source_tokens, strict=True
            )
            if count
        }

    def example(self, rows: int) -> TokenBatch:
        """Return rows of token 0, with the masks that the packing brings.

        Ragged rows are all as long as they can be: an upper bound.
        """
        shape = rows, self.data.seq_len
        if self.data.packing == "ragged":
            flat = torch.zeros(1, rows * self.data.seq_len, dtype=torch.int64)
            lengths = SampleLengths([self.data.seq_len] * rows)
            return TokenBatch(flat, flat.clone(), flat.clone(), row_lengths=lengths)
        tokens, labels = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        positions = documents = padding = None
        if self.data.packing == "documents":
            positions = torch.zeros(shape, dtype=torch.int64)
            documents = torch.zeros(shape, dtype=torch.int32)
        if self.data.packing != "concat":
            padding = torch.zeros(shape, dtype=torch.bool)
        return TokenBatch(tokens, labels, positions, documents, padding_mask=padding)


def find_token_bytes(tokenizer: Tokenizer | None) -> Tensor | None:
    """Return the bytes of text that each token stands for, [V] int64; None if unknown."""
    table = getattr(tokenizer, "token_bytes", None)  # plugins may lack it
    return None if table is None else torch.from_numpy(table)


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
