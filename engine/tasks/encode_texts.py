"""Encodes records of texts and words with labels of classes into arrays. Torch-free.

Functions that encode raise ValueError with the reason if the values of a record are not as
expected; their callers add the place of the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..core.errors import RecipeError, nearest
from ..corpus.records.encode_records import RecordEncoding
from ..sources.files import json_kind, require_field, require_text
from ..tokenizers.byte_tokenizer import begin_text
from ..tokenizers.tokenizer import OffsetTokenizer, Tokenizer

IGNORED = -100
"""the label of a token that does not count; `data.batch` has the same"""

LARGEST_NUMBER = float(np.finfo(np.float32).max)

Values = Mapping[str, Any]
Arrays = dict[str, NDArray[Any]]
Problem = Literal["single", "multi", "regression"]


def make_classification_encoding(
    tokenizer: Tokenizer,
    labels: Sequence[str],
    problem: Problem = "single",
    targets: int = 1,
    *,
    is_labelled: bool = True,
) -> RecordEncoding:
    """Return the encoding of labelled texts; see `encode_classification`.

    Args:
        tokenizer: the tokenizer.
        labels: the names of the classes in their order.
        problem: what a label is.
        targets: how many numbers a label of a regression has.
        is_labelled: False for records whose labels are to be predicted.
    """
    encode = partial(
        encode_classification, tokenizer=tokenizer, labels=labels, problem=problem, targets=targets
    )
    fields = ("text", "label") if is_labelled else ("text",)
    settings = f"classification {[*labels]} {problem} {targets}"
    return RecordEncoding(fields, encode, settings, count_tokens, truncate_text)


def make_token_encoding(
    tokenizer: Tokenizer, labels: Sequence[str], *, is_labelled: bool = True
) -> RecordEncoding:
    """Return the encoding of labelled words; see `encode_tokens` and above.

    Raises:
        RecipeError: the tokenizer does not tell which characters a token stands for.
    """
    require_offsets(tokenizer)
    fields = ("tokens", "labels") if is_labelled else ("tokens",)
    encode = partial(encode_tokens, tokenizer=tokenizer, labels=labels)
    return RecordEncoding(fields, encode, f"words {[*labels]}", count_tokens, truncate_tokens)


def encode_classification(
    values: Values,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    problem: Problem = "single",
    targets: int = 1,
) -> Arrays:
    """Encode a text, the end-of-document token after it, and what the text is labelled with.

    Args:
        values: `text`, and `label` unless it is to be predicted.
        tokenizer: the tokenizer.
        labels: the names of the classes in their order.
        problem: "single": a label is one class; "multi": a list of classes; "regression": a number,
            or a list of numbers in which null stands for one that is not known.
        targets: how many numbers a label of a regression has.

    Returns:
        `tokens` [T] int32 and `labels`: the class (int64), or float32 [classes] of zeros and ones,
        or float32 [targets].
    """
    arrays = {"tokens": begin_text(tokenizer, encode_text(tokenizer, require_text(values, "text")))}
    if "label" not in values:
        return arrays
    label = values["label"]
    if problem == "single":
        return {**arrays, "labels": np.asarray(find_label(label, labels, "label"))}
    if problem == "multi":
        chosen = require_list(label, "label")
        hot = np.zeros(len(labels), dtype=np.float32)
        hot[[find_label(one, labels, "label") for one in chosen]] = 1
        return {**arrays, "labels": hot}
    numbers = label if isinstance(label, list) else [label]
    if len(numbers) != targets:
        raise ValueError(f'"label" has {len(numbers)} numbers, expected {targets}')
    return {**arrays, "labels": np.array([_number(one) for one in numbers], dtype=np.float32)}


def _number(value: Any) -> float:
    if value is None:
        return float("nan")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= LARGEST_NUMBER:  # neither is NaN
        raise ValueError(f'"label" is {json_kind(value)}, expected a finite number')
    return float(value)


def find_label(value: Any, labels: Sequence[str], field: str) -> int:
    """Return the number of a class.

    Args:
        value: the name of the class, or else its number.
        labels: the names of the classes in their order.
        field: the field of the record, for messages.

    Raises:
        ValueError: there is no such class; the message has the nearest name.
    """
    name = str(value).lower() if isinstance(value, bool) else value
    is_number = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    for spelling in (name, str(int(value)) if is_number else ""):
        if isinstance(spelling, str) and spelling in labels:
            return labels.index(spelling)
    if is_number and 0 <= value < len(labels):
        return int(value)
    if is_number:
        raise ValueError(f'"{field}" is {value}; classes are numbered from 0 to {len(labels) - 1}')
    if not isinstance(value, str):
        raise ValueError(f'"{field}" is {json_kind(value)}, expected the name of a class')
    listed = ", ".join(labels[:10]) + (", ..." if len(labels) > 10 else "")
    raise ValueError(
        f'"{field}" has {value[:80]!r}, which is none of task.labels; '
        f"{nearest(value, labels) or f'they are {listed}'}"
    )


def encode_tokens(values: Values, tokenizer: Tokenizer, labels: Sequence[str]) -> Arrays:
    """Encode words, joined by spaces, of which each has a label.

    The first token of a word has the label of the word; its other tokens, spaces between words and
    the end-of-document token have none, as in transformers' examples of token classification.

    Args:
        values: `tokens`, the words, and `labels`, a class for each, unless they are to be
            predicted.
        tokenizer: a tokenizer that gives offsets.
        labels: the names of the classes in their order.

    Returns:
        `tokens` [T] int32 and `labels` [T] int32: the class of each word at its first token, 0
        where words have no labels, and -100 at all other tokens.
    """
    words = require_list(require_field(values, "tokens"), "tokens")
    for word in words:
        if not isinstance(word, str):
            raise ValueError(f'"tokens" has {json_kind(word)}, expected words')
    ids, offsets = encode_with_offsets(tokenizer, " ".join(words))
    first = find_first_tokens(words, offsets)
    found = np.full(len(ids) + 1, IGNORED, dtype=np.int32)
    found[first[first >= 0]] = 0
    if "labels" in values:
        given = require_list(values["labels"], "labels")
        if len(given) != len(words):
            raise ValueError(f'"labels" has {len(given)} entries, and "tokens" has {len(words)}')
        classes = np.array([find_label(label, labels, "labels") for label in given], dtype=np.int32)
        found[first[first >= 0]] = classes[first >= 0]
    return {"tokens": append_end(tokenizer, ids), "labels": found}


def find_first_tokens(words: Sequence[str], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the first token of each word of a text, [words]; -1 for an empty word.

    Args:
        words: the words, which the text holds with one space between them.
        offsets: the range of characters of each token, [T, 2].

    Raises:
        ValueError: a word has no token of its own, because one token holds it and the one before.
    """
    first = np.full(len(words), -1, dtype=np.int64)
    if words and len(offsets):
        lengths = np.array([len(word) for word in words])
        stops = np.cumsum(lengths + 1) - 1
        # A token is the first word's that has a character in it; a space between words is none's.
        owner = np.searchsorted(stops, offsets[:, 0], side="right")
        owner = np.minimum(owner, len(words) - 1)
        is_inside = (stops - lengths)[owner] < offsets[:, 1]
        owners, tokens = np.unique(owner[is_inside], return_index=True)
        first[owners] = np.flatnonzero(is_inside)[tokens]
    for index in np.flatnonzero(first < 0).tolist():
        if words[index].strip():
            raise ValueError(
                f"the word {words[index][:80]!r} has no token of its own: the tokenizer joins it "
                "with the word before"
            )
    return first


def select_words(values: Values, found: Sequence[int], tokenizer: Tokenizer) -> list[int | None]:
    """Return what was found at the first token of each word; see `encode_tokens`.

    Args:
        values: `tokens`, the words.
        found: a number for each token of the text, which may be cut.
        tokenizer: the tokenizer that encoded the words.

    Returns:
        a number for each word; None for an empty word, or one that was cut off.
    """
    words = values["tokens"]
    _, offsets = encode_with_offsets(tokenizer, " ".join(words))
    first = find_first_tokens(words, offsets).tolist()
    # The last token of a text is the end-of-document token, also of a text that was cut.
    return [found[token] if 0 <= token < len(found) - 1 else None for token in first]


def count_tokens(sample: Mapping[str, Any]) -> int:
    """Return the length of an encoded text."""
    return len(sample["tokens"])


def truncate_text(sample: Arrays, length: int) -> Arrays:
    """Cut an encoded text before its end-of-document token."""
    tokens = sample["tokens"]
    return {**sample, "tokens": np.append(tokens[: length - 1], tokens[-1])}


def truncate_tokens(sample: Arrays, length: int) -> Arrays:
    """Cut encoded words, and their labels, before the end-of-document token."""
    labels = sample["labels"]
    cut = np.append(labels[: length - 1], labels[-1])
    return {**truncate_text(sample, length), "labels": cut}


def encode_with_offsets(tokenizer: Tokenizer, text: str) -> tuple[Any, NDArray[np.int64]]:
    """Return the ids of a text, and the range of characters that each stands for.

    Raises:
        RecipeError: the tokenizer does not tell.
    """
    return require_offsets(tokenizer).encode_with_offsets(text)


def require_offsets(tokenizer: Tokenizer) -> OffsetTokenizer:
    """Return a tokenizer that tells which characters a token stands for.

    Raises:
        RecipeError: the tokenizer does not tell.
    """
    if not isinstance(tokenizer, OffsetTokenizer):
        raise RecipeError(
            f"the tokenizer {type(tokenizer).__name__} does not tell which characters a token "
            "stands for, which labels of words and answers need",
            "give it a method encode_with_offsets, or use another tokenizer",
        )
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """Return the ids of a text and the end-of-document token, [T]."""
    return append_end(tokenizer, tokenizer.encode(text))


def append_end(tokenizer: Tokenizer, ids: NDArray[Any]) -> NDArray[np.int32]:
    """Return ids with the end-of-document token after them, [T]."""
    return np.append(np.asarray(ids, dtype=np.int32), np.int32(tokenizer.eos_id))


def require_list(value: Any, field: str) -> list[Any]:
    """Return a value that must be a list.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, list):
        raise ValueError(f'"{field}" is {json_kind(value)}, expected an array')
    return value
