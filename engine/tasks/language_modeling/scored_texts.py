"""Texts whose tokens are scored one by one, outside of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...corpus.records.encode_records import RecordEncoding
from ...data.batch import IGNORED, TokenBatch
from ...data.collate import Arrays, Collation, Sample, pad_arrays
from ...sources.files import require_text
from ...tokenizers.byte_tokenizer import context_id
from ...tokenizers.tokenizer import Tokenizer


def make_text_encoding(tokenizer: Tokenizer) -> RecordEncoding:
    """Return the encoding of texts, each after the end-of-document token."""
    encode = partial(_encode_text, tokenizer=tokenizer)
    return RecordEncoding(("text",), encode, "scored texts", count_inputs, _truncate)


def make_text_collation(eos_id: int) -> Collation:
    """Return how encoded texts become rows of tokens with the token after each as label."""
    return Collation(partial(_collate, eos_id=eos_id), TokenBatch, count_inputs)


def count_inputs(sample: Mapping[str, Any]) -> int:
    """Return the number of tokens of a text that are predicted."""
    return len(sample["tokens"]) - 1


def _encode_text(values: Mapping[str, Any], tokenizer: Tokenizer) -> Arrays:
    ids = tokenizer.encode(require_text(values, "text"))
    return {"tokens": np.concatenate([[context_id(tokenizer)], ids]).astype(np.int32)}


def _truncate(sample: Arrays, length: int) -> Arrays:
    return {"tokens": sample["tokens"][: length + 1]}


def _collate(samples: Sequence[Sample], length: int, eos_id: int) -> Arrays:
    rows = [sample["tokens"] for sample in samples]
    lengths = np.array([len(row) - 1 for row in rows])
    return {
        "tokens": pad_arrays((row[:-1] for row in rows), length, eos_id),
        "labels": pad_arrays((row[1:] for row in rows), length, IGNORED),
        "padding_mask": np.arange(length) >= lengths[:, None],
    }
