"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from ..errors import DataError, EnvironmentFault, nearest

if TYPE_CHECKING:
    from .configs import MarkedText

Ids = NDArray[Any]


class Tokenizer(Protocol):
    """What the data and generation need of a tokenizer."""

    vocab_size: int
    """one more than the largest id"""
    eos_id: int
    """the end-of-document token"""
    fingerprint: str
    """a hash that changes whenever the same text may give other ids"""

    def encode(self, text: str) -> Ids:
        """Return the text's ids, 1-D, without the end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts."""

    def encode_marked(self, texts: Sequence[MarkedText]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return the ids of several documents, and which of them are learned.

        The ids are those of `encode_batch`. A token is learned if all characters that it stands
        for, even in part, lie in learned ranges: one that reaches over a range's border is not. A
        token that stands for none, such as a space put before the text, goes with the character
        after it.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""

    def save(self, folder: Path) -> None:
        """Write the files that rebuild it into the folder."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> Ids:
        """Return the text's bytes."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of several texts."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, texts: Sequence[MarkedText]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return the bytes of several documents; those of a learned character are learned."""
        found = []
        for marked in texts:
            ids = self.encode(marked.text)
            characters = np.cumsum((ids & 0xC0) != 0x80) - 1  # 10xxxxxx continues a character
            found.append((ids, learned_tokens(marked, characters, characters + 1)))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write nothing: it has no files."""


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Args:
        path: the file, or the folder that holds it.
        eos_token: the end-of-document token; None: what the files beside it say.

    Raises:
        DataError: a file is missing or malformed, or there is no such token.
        EnvironmentFault: the `tokenizers` package is not installed.
    """

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        path = path.expanduser()
        self.file = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer, content = _load(self.file)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.eos_token = eos_token or _eos_token(self.file, vocabulary)
        if self.eos_token not in vocabulary:
            hint = nearest(self.eos_token, vocabulary)
            raise DataError(f"{self.file}: no token is named {self.eos_token!r}", hint)
        self.eos_id = vocabulary[self.eos_token]
        self.fingerprint = xxh3_128_hexdigest(content + b"\n%d" % self.eos_id)

    def encode(self, text: str) -> Ids:
        """Return the text's ids; no special token is added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts, tokenised on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_marked(self, texts: Sequence[MarkedText]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return ids by the library's offsets; its normalizer's changes are traced back."""
        encodings = self._tokenizer.encode_batch(
            [marked.text for marked in texts], add_special_tokens=False
        )
        found = []
        for marked, encoding in zip(texts, encodings, strict=True):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            learned = learned_tokens(marked, offsets[:, 0], offsets[:, 1])
            found.append((np.array(encoding.ids, dtype=np.uint32), learned))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Copy `tokenizer.json`, and write which token ends a document beside it."""
        shutil.copyfile(self.file, folder / "tokenizer.json")
        config = json.dumps({"eos_token": self.eos_token}, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def learned_tokens(
    marked: MarkedText, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which tokens are learned, [T].

    Args:
        marked: the document.
        starts: [T], the first character of each token.
        stops: [T], the character after its last.
    """
    length = len(marked.text)
    inside = np.zeros(length + 1, dtype=np.int64)
    for start, stop in marked.learned:
        inside[start + 1 : stop + 1] = 1
    before = np.cumsum(inside)  # [k]: learned characters among the first k
    starts = np.minimum(starts, max(length - 1, 0))
    stops = np.minimum(np.maximum(stops, starts + 1), length)
    return np.asarray(before[stops] - before[starts] == stops - starts)


def _load(file: Path) -> tuple[Any, bytes]:
    try:
        from tokenizers import Tokenizer as Native
    except ImportError as error:
        raise EnvironmentFault(
            'tokenizer "hf" needs the tokenizers package', 'pip install "trainer[hf]"'
        ) from error
    try:
        content = file.read_bytes()
        tokenizer = Native.from_str(content.decode())
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}", "tokenizer.path is a tokenizer.json or its folder"
        ) from error
    except Exception as error:  # the library raises bare Exception for malformed files
        raise DataError(f"{file}: not a tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = None  # without special tokens it only cuts spaces off the offsets
    return tokenizer, content


def _eos_token(file: Path, vocabulary: dict[str, int]) -> str:
    """Find the end-of-document token in the files beside the tokenizer, or by its usual names."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        beside = file.with_name(name)
        if not beside.is_file():
            continue
        try:
            token = json.loads(beside.read_text(encoding="utf-8-sig")).get("eos_token")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{beside}: not a JSON object: {error}") from error
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    for name in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>"):
        if name in vocabulary:
            return name
    raise DataError(f"{file}: nothing says which token ends a document", "set tokenizer.eos_token")
