"""The arrays of a token store on their way to disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from ..core.errors import DataError
from ..tokenizers.tokenizer import Ids, Tokenizer
from .manifest import TokenFileEntry, shard_name

Learned = NDArray[np.bool_]


class Chunk(NamedTuple):
    """Some documents as tokens."""

    tokens: Ids
    """[T]; the documents end to end, each followed by the eos token"""
    lengths: NDArray[np.int64]
    """[documents]; tokens of each, eos included"""
    learned: Learned | None
    """[T]; None: all"""


def token_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the narrowest type that holds every id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def make_chunk(
    tokenizer: Tokenizer, documents: Sequence[Ids], learned: Sequence[Learned] | None = None
) -> Chunk:
    """Put documents end to end, each followed by the eos token.

    Args:
        tokenizer: whose ids they are.
        documents: ids.
        learned: which of them are, the eos token's included.

    Raises:
        DataError: an id is outside the tokenizer's vocabulary.
    """
    dtype = token_type(tokenizer)
    eos = np.array([tokenizer.eos_id], dtype=dtype)
    flat = np.concatenate([part for document in documents for part in (document, eos)])
    largest = int(flat.max())
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer gave id {largest}; its vocabulary has {tokenizer.vocab_size}"
        )
    lengths = np.array([len(document) + 1 for document in documents])
    marks = None if learned is None else np.concatenate(learned)
    return Chunk(flat.astype(dtype, copy=False), lengths, marks)


class Column:
    """One value a token, in files of `shard_tokens` values each."""

    def __init__(self, folder: Path, name: str, shard_tokens: int) -> None:
        self.folder = folder
        self.name = name
        self.shard_tokens = shard_tokens
        self.files: dict[str, TokenFileEntry] = {}
        self.hash = xxh3_128()
        self._file: IO[bytes] | None = None
        self._file_hash = xxh3_128()
        self._room = 0

    def write(self, values: NDArray[Any]) -> None:
        """Add values, beginning a new file where one is full."""
        while len(values):
            if not self._room:
                self.end_file()
                name = shard_name(self.name, len(self.files))
                self._file = open(self.folder / name, "xb")  # noqa: SIM115  `end_file` closes it
                self._file_hash, self._room = xxh3_128(), self.shard_tokens
            head, values = values[: self._room], values[self._room :]
            self._room -= len(head)
            data = np.ascontiguousarray(head).view(np.uint8).data
            assert self._file is not None
            self._file.write(data)
            self._file_hash.update(data)
            self.hash.update(data)

    def end_file(self) -> None:
        """Sync the file that is being written, and take down what it holds."""
        if self._file:
            sync(self._file)
            size = self._file.tell()
            self.files[Path(self._file.name).name] = TokenFileEntry(
                bytes=size, xxh3=self._file_hash.hexdigest()
            )
            self.close()

    def close(self) -> None:
        """Leave the file as it is."""
        if self._file:
            self._file.close()
            self._file, self._room = None, 0


def sync(file: IO[bytes]) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())
