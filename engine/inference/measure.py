"""Measures loss and perplexity of a model on texts, per token, per byte and per word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..assemble.precomputed import NamedSamples
from ..assemble.splits import open_further_splits
from ..assemble.training import open_training
from ..core.errors import DataError, RecipeError, nearest
from ..corpus.cache import default_cache
from ..corpus.checksums import ALONE
from ..corpus.prepare import open_stores
from ..data.batch import IGNORED, Batch, TokenBatch
from ..data.loader import iterate_validation
from ..observe.metrics import VALIDATION
from ..sources.configs import DocumentSource, SourceConfig
from ..sources.documents import DocumentFault
from ..tasks.language_modeling.next_token import perplexity
from ..tasks.tables import TaskData
from ..tokenizers.byte_tokenizer import begin_id, context_id, count_text_bytes
from ..tokenizers.tokenizer import MaskedDocument, Tokenizer
from .open import OpenedModel
from .score import ScoredWindow, windows


@dataclass
class Measured:
    """Sums over texts. A word is a run of characters between white space."""

    name: str
    nll: float = 0.0
    """sum of the negative log-probabilities of the tokens, in nats"""
    texts: int = 0
    """number of documents, or of rows for a validation split"""
    tokens: int = 0
    bytes: int = 0
    words: int = 0
    skipped: int = 0
    """documents that could not be read"""
    sources: list[Measured] = field(default_factory=list)
    """the sums of each source if there are several, else empty"""

    def count_text(self, text: str, num_bytes: int) -> None:
        """Add the bytes and words of a text to the sums.

        Args:
            text: the text.
            num_bytes: the length of the text in bytes.
        """
        self.bytes += num_bytes
        self.words += len(text.split())

    def count_tokens(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        """Add the bytes and words of the decoded text of token ids to the sums."""
        text = tokenizer.decode(ids)
        self.count_text(text, count_text_bytes(tokenizer, ids, text))

    def per(self, unit: str) -> dict[str, float]:
        """Return the count of a unit, and loss in nats, bits and perplexity per unit.

        Args:
            unit: "token", "byte" or "word".
        """
        count = getattr(self, f"{unit}s")
        loss = self.nll / count if count else math.nan
        return {
            "count": count,
            "loss": loss,
            "bits": loss / math.log(2),
            "perplexity": perplexity(loss),
        }

    def summary(self) -> dict[str, Any]:
        """Return the content of `trainer evaluate --json`."""
        return {
            "name": self.name,
            "texts": self.texts,
            "skipped": self.skipped,
            **{unit: self.per(unit) for unit in ("token", "byte", "word")},
        }


class Encoded:
    """A document as tokens, after one that begins a text, and the part of it that is scored.

    Args:
        ids: the token ids of the document, [T].
        text: the part of the document's text that is scored.
        counted: the mask of scored ids, [T]; None scores all.
        tokenizer: the tokenizer, which says which token precedes the document.
        num_bytes: the bytes of `text`; None takes the length of the text in UTF-8.
    """

    def __init__(
        self,
        ids: NDArray[Any],
        text: str,
        counted: NDArray[np.bool_] | None,
        tokenizer: Tokenizer,
        num_bytes: int | None = None,
    ) -> None:
        first = context_id(tokenizer)
        if begin_id(tokenizer) is not None and len(ids) and ids[0] == first:  # stored with it
            ids, counted = ids[1:], None if counted is None else counted[1:]
        self.tokens = np.concatenate([[first], ids]).astype(np.int64)
        self.text = text
        self.num_bytes = len(text.encode()) if num_bytes is None else num_bytes
        self.counted = None if counted is None else np.concatenate([[False], counted])


def measure_source(
    opened: OpenedModel,
    source: SourceConfig,
    *,
    name: str,
    seq_len: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    limit: int = 0,
) -> Measured:
    """Score whole documents, each token once. The end-of-document token precedes each document.

    Args:
        opened: the model.
        source: the source of the documents.
        name: the name of the result.
        seq_len: most inputs a row; None takes that of training.
        stride: tokens scored by each row of a long document but the first; None is `seq_len`.
        batch_size: rows computed together.
        limit: the number of documents to score; 0 is all.

    Raises:
        RecipeError: the stride is longer than a row.
        DataError: a document cannot be read, or there is none.
    """
    seq_len = seq_len or opened.recipe.data.largest.seq_len
    stride = stride or seq_len
    if stride > seq_len:
        raise RecipeError(
            f"--stride {stride} is longer than a row of {seq_len} tokens", "lower it, or --seq-len"
        )
    measured = Measured(name)
    documents = islice(_encode(source, opened.tokenizer, measured), limit or None)

    def rows() -> Iterator[ScoredWindow]:
        for document in documents:
            measured.texts += 1
            measured.count_text(document.text, document.num_bytes)
            yield from windows(document.tokens, seq_len, stride, counted=document.counted)

    for _, score in opened.scorer.score_windows(rows(), batch_size):
        measured.nll += score.nll
        measured.tokens += score.num_tokens
    if not measured.tokens:
        raise DataError(f"{name}: holds no text")
    return measured


def open_splits(opened: OpenedModel, name: str = "") -> list[NamedSamples]:
    """Return what the recipe holds out, and its further splits.

    Args:
        opened: the model of a checkpoint.
        name: the split alone that is returned; empty: all.

    Raises:
        RecipeError: the model is of a Hugging Face folder, or the recipe has no such split.
        DataError: the recipe holds nothing out.
    """
    recipe, hint = opened.recipe, "name texts or records with --data or --source"
    if opened.step is None:
        folder = f"{opened.path} is a Hugging Face folder, without a recipe that holds data out"
        raise RecipeError(folder, hint)
    held_out = [f"{VALIDATION}.{each.name}" for each in recipe.data.splits] or [VALIDATION]
    known = [*held_out, *(each.name for each in recipe.evaluate.splits)]
    if name and name not in known:
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        raise RecipeError(f'the recipe has no split "{name}"', hint)
    data = TaskData(opened.data, opened.tokenizer, recipe.run.seed, "", ALONE, loss=recipe.loss)
    recipe = recipe.model_copy(update={"data": opened.data})
    found = open_training(recipe.task, data).validation if name in ("", *held_out) else []
    splits = [
        NamedSamples(f"{VALIDATION}.{split}" if split else VALIDATION, samples, table, {})
        for split, samples, table in found
        if name in ("", VALIDATION, f"{VALIDATION}.{split}")
    ]
    splits += open_further_splits(recipe, data, [name] * bool(name))
    if not splits:
        raise DataError("the recipe holds nothing out for validation", hint)
    return splits


def measure_split(
    opened: OpenedModel, split: NamedSamples, *, batch_size: int = 8, limit: int = 0
) -> Measured:
    """Score the rows of a split of the recipe, as the evaluations of the run do.

    Args:
        opened: the model of a checkpoint.
        split: one of `open_splits`.
        batch_size: rows computed together.
        limit: the number of rows to score; 0 is all.
    """
    samples, title = split.samples, f"{split.name} split"
    count = min(limit or samples.rows_per_epoch, samples.rows_per_epoch)
    batch_size = min(batch_size, count)
    table = split.table.model_copy(update={"micro_batch": batch_size, "global_batch": batch_size})
    names = samples.separate_labels or ("",)
    sources = [Measured(f"{title}, {name}") for name in names]
    left, ids = count, [np.empty(0, np.int64)] * len(sources)
    batches = iterate_validation(samples, table, -(-count // batch_size), 0, 1)
    scored = opened.scorer.score_batches(_leave_out(batches, count))
    for batch, scores in scored:
        which = [0] * len(batch.labels) if batch.sources is None else batch.sources.tolist()
        rows = zip(which, batch.labels, scores, strict=True)
        for source, labels, score in islice(rows, left):
            sources[source].nll += score.nll
            sources[source].tokens += score.num_tokens
            sources[source].texts += 1
            row = np.concatenate([ids[source], labels[labels != IGNORED].numpy()])
            ends = np.flatnonzero(row == opened.tokenizer.eos_id) + 1
            # A document may continue in the next row: its bytes are counted once it has ended.
            *documents, ids[source] = np.split(row, ends)
            for document in documents:
                sources[source].count_tokens(opened.tokenizer, document.tolist())
        left = max(0, left - len(batch.labels))
    for source, rest in enumerate(ids):
        sources[source].count_tokens(opened.tokenizer, rest.tolist())
    return _add_sources(title, sources)


def _leave_out(batches: Iterable[Batch], count: int) -> Iterator[tuple[TokenBatch, TokenBatch]]:
    """Yield each batch twice, without the labels of rows after the first `count`."""
    for batch in batches:
        assert isinstance(batch, TokenBatch), "language modelling has no others"
        batch.labels[max(count, 0) :] = IGNORED
        count -= len(batch.labels)
        yield batch, batch


def _add_sources(name: str, sources: list[Measured]) -> Measured:
    """Return the sum of the measurements of several sources."""
    return Measured(
        name,
        nll=sum(each.nll for each in sources),
        texts=sum(each.texts for each in sources),
        tokens=sum(each.tokens for each in sources),
        bytes=sum(each.bytes for each in sources),
        words=sum(each.words for each in sources),
        sources=sources if len(sources) > 1 else [],
    )


def _encode(source: SourceConfig, tokenizer: Tokenizer, measured: Measured) -> Iterator[Encoded]:
    if not isinstance(source, DocumentSource):
        yield from _read_stored(source, tokenizer)
        return
    source = source.for_tokenizer(tokenizer)
    for document in chain.from_iterable(map(source.read, source.parts())):
        if isinstance(document, DocumentFault):
            if source.on_error == "stop":
                raise DataError(
                    str(document), 'leave such documents out with --set on_error="skip"'
                )
            measured.skipped += 1
        elif isinstance(document, MaskedDocument):
            ((ids, counted),) = tokenizer.encode_masked([document])
            text = "".join(document.text[start:stop] for start, stop in document.loss_ranges)
            yield Encoded(ids, text, counted, tokenizer)
        elif document:
            yield Encoded(tokenizer.encode(document), document, None, tokenizer)


def _read_stored(source: SourceConfig, tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yield documents that are stored as tokens; end-of-document tokens are not scored."""
    stores = open_stores(source, tokenizer, default_cache())
    for store, number in ((each, n) for each in stores for n in range(each.num_documents)):
        start, stop = int(store.offsets[number]), int(store.offsets[number + 1]) - 1
        ids = np.asarray(store.tokens[start:stop])
        counted = None if store.loss_mask is None else np.asarray(store.loss_mask[start:stop])
        shown = ids if counted is None else ids[counted]
        text = tokenizer.decode(shown.tolist())
        num_bytes = count_text_bytes(tokenizer, shown.tolist(), text)
        yield Encoded(ids, text, counted, tokenizer, num_bytes)
