"""Makes batches of encoded texts, questions and pairs of answers, padded at the right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.batch import IGNORED
from ..data.collate import Arrays, Sample, pad_arrays
from ..sources.chat_answers import answer_names
from .encode_answers import SEPARATOR


def collate_texts(samples: Sequence[Sample], length: int, eos_id: int) -> Arrays:
    """Return the arrays of texts that have one label each.

    Args:
        samples: `tokens` [T], `labels` (a number, or as many for each sample), other numbers, and
            `answers` [L], the bytes of texts, if there are such.
        length: the number of positions of a row.
        eos_id: the token of padding.

    Returns:
        `tokens` [B, S] int64, `lengths` [B] int64, `padding_mask` [B, S], and the other fields, [B]
        or [B, C].
    """
    arrays = pad_texts([sample["tokens"] for sample in samples], length, eos_id)
    others = [name for name in samples[0] if name not in ("tokens", "answers")]
    if "answers" in samples[0]:
        answers = [sample["answers"] for sample in samples]
        arrays["answers"] = pad_arrays(answers, max(map(len, answers)), SEPARATOR, np.uint8)
    return arrays | {name: np.stack([sample[name] for sample in samples]) for name in others}


def collate_tokens(samples: Sequence[Sample], length: int, eos_id: int) -> Arrays:
    """Return the arrays of texts that have a label for each token; see `collate_texts`.

    Returns:
        `tokens`, `lengths` and `padding_mask`, and `labels` [B, S] int64, -100 at padding.
    """
    arrays = pad_texts([sample["tokens"] for sample in samples], length, eos_id)
    labels = pad_arrays((sample["labels"] for sample in samples), length, IGNORED)
    return {**arrays, "labels": labels}


def drop_padding(
    samples: Sequence[Sample],
    length: int,
    collate: Callable[[Sequence[Sample], int], Arrays],
    fields: Collection[str],
) -> Arrays:
    """Return texts without padding, one after the other.

    Args:
        samples: as `collate` takes them.
        length: see `collate`.
        collate: returns padded rows.
        fields: the fields that have a value for each position.

    Returns:
        these fields and `positions`, [1, T], and the others as `collate` returns them.
    """
    arrays = collate(samples, length)
    is_token = ~arrays.pop("padding_mask")
    flat = {name: arrays[name][is_token][None] for name in fields if name in arrays}
    return {**arrays, **flat, "positions": np.nonzero(is_token)[1][None]}


def collate_answers(samples: Sequence[Sample], length: int, eos_id: int) -> Arrays:
    """Return the arrays of answers, a row each: of a pair the chosen and then the rejected one.

    Args:
        samples: `prompt`, and `chosen` and `rejected` or a single `answer`, each [T].
        length: the number of positions of a row.
        eos_id: the token of padding.

    Returns:
        `tokens` [R, S] int64, each row a prompt and an answer; `labels` [R, S] int64, the token
        after each position if it is the answer's, else -100; `lengths` [R] and `padding_mask`; and
        `is_single` [R] if some rows are single answers.
    """
    rows, labels, singles = [], [], []
    for sample in samples:
        prompt = sample["prompt"]
        for name in answer_names(sample):
            singles.append(name == "answer")
            row = np.concatenate([prompt, sample[name]])
            following = np.append(row[1:], IGNORED).astype(np.int64)
            following[: max(len(prompt) - 1, 0)] = IGNORED
            rows.append(row)
            labels.append(following)
    arrays = {**pad_texts(rows, length, eos_id), "labels": pad_arrays(labels, length, IGNORED)}
    return arrays | ({"is_single": np.array(singles)} if any(singles) else {})


def pad_texts(texts: Sequence[NDArray[Any]], length: int, eos_id: int) -> Arrays:
    """Return texts as rows of tokens, and where they end.

    Args:
        texts: the token ids of each, [T].
        length: the number of positions of a row.
        eos_id: the token of padding.

    Returns:
        `tokens` [B, length] int64, `lengths` [B] int64, and `padding_mask` [B, length], True at
        padding.
    """
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    padding_mask = np.arange(length) >= lengths[:, None]
    tokens = pad_arrays(texts, length, eos_id)
    return {"tokens": tokens, "lengths": lengths, "padding_mask": padding_mask}
