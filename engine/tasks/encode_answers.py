"""Encodes records of questions, and of pairs of answers, into arrays. Torch-free.

Functions that encode raise ValueError with the reason if the values of a record are not as
expected; their callers add the place of the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..corpus.records.encode_records import RecordEncoding
from ..sources.chat_answers import PAIR, answer_names
from ..sources.files import json_kind, require_field, require_text
from ..tokenizers.byte_tokenizer import begin_text
from ..tokenizers.tokenizer import Tokenizer
from .encode_texts import (
    Arrays,
    Values,
    append_end,
    count_tokens,
    encode_text,
    encode_with_offsets,
    require_offsets,
    truncate_text,
)

SEPARATOR = 0xFF
"""the byte after each text of several; UTF-8 has no such byte"""


def make_question_encoding(tokenizer: Tokenizer, *, is_labelled: bool = True) -> RecordEncoding:
    """Return the encoding of questions about texts; see `encode_question`.

    Args:
        tokenizer: the tokenizer.
        is_labelled: False for records whose answers are to be predicted.

    Raises:
        RecipeError: the tokenizer does not tell which characters a token stands for.
    """
    require_offsets(tokenizer)
    fields = ("question", "context", "answers") if is_labelled else ("question", "context")
    encode = partial(encode_question, tokenizer=tokenizer)
    return RecordEncoding(fields, encode, "question answers", count_tokens, truncate_question)


def make_preference_encoding(tokenizer: Tokenizer) -> RecordEncoding:
    """Return the encoding of pairs of answers; see `encode_preference`."""
    return RecordEncoding(
        ("prompt", "chosen", "rejected"),
        partial(encode_preference, tokenizer=tokenizer),
        "preference",
        count_answer_tokens,
        truncate_preference,
        holds_answers=True,
    )


def make_answer_encoding(tokenizer: Tokenizer) -> RecordEncoding:
    """Return the encoding of single answers, which are scored; see `encode_preference`."""
    encoding = make_preference_encoding(tokenizer)
    return replace(encoding, fields=("prompt", "answer"), settings="answer")


def encode_question(values: Values, tokenizer: Tokenizer) -> Arrays:
    """Encode a question, a line break, the context, and the end-of-document token.

    Args:
        values: `question`, `context`, and `answers`, unless they are to be predicted: `text` and
            `answer_start`, the index of its first character in the context; each a list or one
            value, or a list of such pairs. The first answer is learned, and all are right; a
            question without answers has the end-of-document token as its answer, which the whole
            context precedes.
        tokenizer: a tokenizer that gives offsets.

    Returns:
        `tokens` [T] int32, `context_start`, the first token of the context, `labels` [2] int64:
        the first and the last token of the answer, and `answers`, see `encode_answer_texts`.
    """
    question, context = require_text(values, "question"), require_text(values, "context")
    ids, offsets = encode_with_offsets(tokenizer, f"{question}\n{context}")
    before = len(question) + 1
    context_start = int(np.searchsorted(offsets[:, 1], before, side="right"))
    arrays = {
        "tokens": append_end(tokenizer, ids),
        "context_start": np.asarray(min(context_start, len(ids))),
    }
    if "answers" not in values:
        return arrays
    span = len(ids), len(ids)
    if answer := _first_answer(values["answers"]):
        text, start = answer
        if not text or context[start : start + len(text)] != text:
            found = context[start : start + len(text)]
            raise ValueError(
                f'"answers" has {text[:60]!r} at character {start}, where the context has '
                f"{found[:60]!r}"
            )
        span = find_span(offsets, before + start, before + start + len(text))
    answers = encode_answer_texts(values["answers"])
    return {**arrays, "labels": np.array(span, dtype=np.int64), "answers": answers}


def encode_answer_texts(answers: Any) -> NDArray[np.uint8]:
    """Return the texts of all answers in UTF-8, each once and with `SEPARATOR` after it, [L]."""
    pairs = answers if isinstance(answers, list) else [answers]
    texts: list[str] = []
    for pair in pairs:
        if not isinstance(pair, Mapping):
            raise ValueError(f'"answers" has {json_kind(pair)}, expected text and answer_start')
        text = require_field(pair, "text")
        texts += text if isinstance(text, list) else [text]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f'"answers" has {json_kind(text)}, expected a text')
    separator = bytes([SEPARATOR])
    joined = b"".join(text.encode("utf-8") + separator for text in dict.fromkeys(texts))
    return np.frombuffer(joined, dtype=np.uint8)


def decode_answer_texts(codes: bytes) -> list[str]:
    """Return the texts of `encode_answer_texts`, which more separators may follow.

    A question without an answer has the empty text, as SQuAD 2 scores it.
    """
    texts = codes.rstrip(bytes([SEPARATOR]))
    return [each.decode("utf-8") for each in texts.split(bytes([SEPARATOR]))]


def find_span(offsets: NDArray[np.int64], start: int, stop: int) -> tuple[int, int]:
    """Return the first and the last token that hold characters of a range.

    Args:
        offsets: the range of characters of each token, [T, 2], ascending.
        start: the first character of the range.
        stop: the character after the range.

    Raises:
        ValueError: no token holds any.
    """
    first = np.searchsorted(offsets[:, 1], start, side="right")
    last = np.searchsorted(offsets[:, 0], stop, side="left") - 1
    if first > last:  # a normalizer may drop characters
        raise ValueError("no token stands for the answer")
    return int(first), int(last)


def locate_answer(
    values: Values, span: tuple[int, int] | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the characters of the context that a span of tokens stands for.

    Args:
        values: `question` and `context`.
        span: the first and the last token of the encoded record; None: there is no answer.
        tokenizer: the tokenizer that encoded the record.

    Returns:
        `answer`, the text, `start`, its first character in the context, and `end`, the character
        after it; "" and None without an answer.
    """
    if span is None:
        return {"answer": "", "start": None, "end": None}
    question, context = values["question"], values["context"]
    _, offsets = encode_with_offsets(tokenizer, f"{question}\n{context}")
    before = len(question) + 1
    start = max(int(offsets[span[0], 0]) - before, 0)
    end = max(int(offsets[span[1], 1]) - before, start)
    # A token may hold the space before a word.
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    answer = text.strip()
    return {"answer": answer, "start": start, "end": start + len(answer)}


def _first_answer(answers: Any) -> tuple[str, int] | None:
    """Return the text and the first character of the first answer; None: there is no answer."""
    if isinstance(answers, list):
        if not answers:
            return None
        answers = answers[0]
    if not isinstance(answers, Mapping):
        raise ValueError(f'"answers" is {json_kind(answers)}, expected text and answer_start')
    text, start = (require_field(answers, key) for key in ("text", "answer_start"))
    if isinstance(text, list) and isinstance(start, list):
        if not text and not start:
            return None
        text, start = (one[0] if one else None for one in (text, start))
    if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int):
        kinds = f"{json_kind(text)} and {json_kind(start)}"
        raise ValueError(f'"answers" has {kinds}, expected a text and the number of a character')
    if start < 0:
        raise ValueError(f'"answers" begin at character {start}')
    return text, start


def encode_preference(values: Values, tokenizer: Tokenizer) -> Arrays:
    """Encode a prompt and its answers apart, as a model that generates gets the prompt.

    Args:
        values: `chosen` and `rejected`, or a single `answer`, and `prompt`, which may be missing.
        tokenizer: the tokenizer.

    Returns:
        `prompt` and the answers, each [T] int32; the end-of-document token ends each answer.
    """
    prompt = require_text(values, "prompt") if "prompt" in values else ""
    names = answer_names(values) or PAIR
    return {
        "prompt": begin_text(tokenizer, tokenizer.encode(prompt)).astype(np.int32),
        **{name: encode_text(tokenizer, require_text(values, name)) for name in names},
    }


def truncate_question(sample: Arrays, length: int) -> Arrays:
    """Cut the context; an answer that is not whole in what is left becomes no answer."""
    cut, labels = truncate_text(sample, length), sample.get("labels")
    cut["context_start"] = np.minimum(sample["context_start"], length - 1)
    if labels is not None and labels[1] >= length - 1:
        cut["labels"] = np.full(2, length - 1, dtype=np.int64)
    return cut


def count_answer_tokens(sample: Mapping[str, Any]) -> int:
    """Return the length of the prompt with the longest answer."""
    return len(sample["prompt"]) + max(len(sample[name]) for name in answer_names(sample))


def truncate_preference(sample: Arrays, length: int) -> Arrays:
    """Cut the beginning of the prompt, to half of the length at most, then the answers' ends."""
    longest = count_answer_tokens(sample) - len(sample["prompt"])
    kept = min(len(sample["prompt"]), max(length - longest, length // 2))
    prompt = sample["prompt"][len(sample["prompt"]) - kept :]
    answers = {name: sample[name][: length - kept] for name in answer_names(sample)}
    return {"prompt": prompt, **answers}
