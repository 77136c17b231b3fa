"""A corpus as one long array of tokens on disk, memory-mapped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from xxhash import xxh3_128

from ..config import Count, CountOrZero, Table
from ..errors import DataError
from ..files import sync_folder
from .tokenizer import Ids, Tokenizer

FORMAT: Final = 1
TOKENS, OFFSETS, INDEX = "tokens-00000.bin", "offsets.npy", "tokens.json"


@dataclass(frozen=True)
class TokenStore:
    """Documents as tokens.

    Attributes:
        tokens: [num_tokens] uint16 or uint32; each document is followed by the eos token.
        offsets: [num_documents + 1] int64; where each document starts.
        eos_id: the end-of-document token.
        fingerprint: xxh3-128 of the tokens' bytes.
        skipped: documents left out because they could not be read.
        faults: what was wrong with the first of them.
        place: what to call it in messages.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    eos_id: int
    fingerprint: str
    skipped: int = 0
    faults: Sequence[str] = ()
    place: str = "tokens"

    @property
    def num_tokens(self) -> int:
        """How many tokens there are, eos tokens included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.offsets) - 1

    @staticmethod
    def open(folder: Path, tokenizer: Tokenizer) -> TokenStore:
        """Memory-map a folder written by `StoreWriter`.

        Raises:
            DataError: it is missing, incomplete, or made with another tokenizer.
        """
        index = _read_index(folder)
        if index.tokenizer != tokenizer.fingerprint:
            raise DataError(
                f"{folder}: made with another tokenizer (vocabulary of {index.vocab_size}; "
                f"the recipe's has {tokenizer.vocab_size})",
                "prepare it again with the recipe's tokenizer, or name the one it was made with",
            )
        for name, expected in ((TOKENS, index.files.tokens), (OFFSETS, index.files.offsets)):
            size = (folder / name).stat().st_size if (folder / name).is_file() else None
            if size != expected.bytes:
                found = "missing" if size is None else f"{size} bytes"
                raise DataError(
                    f"{folder / name}: {found}; {INDEX} says {expected.bytes} bytes",
                    "prepare it again",
                )
        # Plain arrays: slices of np.memmap run Python code each time.
        tokens = np.asarray(np.memmap(folder / TOKENS, dtype=index.dtype, mode="r"))
        try:
            offsets = np.asarray(np.load(folder / OFFSETS, mmap_mode="r", allow_pickle=False))
            fits = offsets.dtype == np.int64 and offsets[0] == 0 and offsets[-1] == len(tokens)
        except (ValueError, IndexError):
            fits = False
        if not fits:
            raise DataError(f"{folder / OFFSETS}: not the offsets of {TOKENS}", "prepare it again")
        return TokenStore(
            tokens=tokens,
            offsets=offsets,
            eos_id=tokenizer.eos_id,
            fingerprint=index.files.tokens.xxh3,
            skipped=index.skipped,
            faults=index.faults,
            place=str(folder),
        )


class FileEntry(Table):
    """One file of a store."""

    bytes: Count
    xxh3: str


class Files(Table):
    """The files of a store beside its index."""

    tokens: FileEntry = Field(alias="tokens-00000.bin")
    offsets: FileEntry = Field(alias="offsets.npy")


class Index(Table):
    """`tokens.json`: what is in a folder of tokens."""

    format: Literal[1]
    dtype: Literal["uint16", "uint32"]
    num_tokens: Count
    num_documents: Count
    tokenizer: str
    """the tokenizer's fingerprint"""
    vocab_size: Count
    eos_id: CountOrZero
    files: Files
    skipped: CountOrZero
    faults: list[str]


def _read_index(folder: Path) -> Index:
    file = folder / INDEX
    try:
        return Index.model_validate_json(file.read_bytes())
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", "a folder of tokens holds it") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DataError(f"{file}: {key}: {first['msg']}", "prepare it again") from error


class StoreWriter:
    """Writes a token store into a new folder; complete once `finish` has returned.

    Args:
        folder: is created.
        tokenizer: its vocabulary bounds the ids and sets their width.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        self.num_tokens = 0
        self._lengths: list[NDArray[np.int64]] = []
        self._hash = xxh3_128()

    def __enter__(self) -> StoreWriter:
        self.folder.mkdir(parents=True)
        self._file = open(self.folder / TOKENS, "xb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, documents: Sequence[Ids]) -> None:
        """Add documents, each without its eos token.

        Raises:
            DataError: an id is outside the tokenizer's vocabulary.
        """
        eos = np.array([self.tokenizer.eos_id], dtype=self.dtype)
        flat = np.concatenate([part for document in documents for part in (document, eos)])
        largest = int(flat.max())
        if largest >= self.tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gave id {largest}; its vocabulary has {self.tokenizer.vocab_size}"
            )
        data = flat.astype(self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._lengths.append(np.array([len(document) + 1 for document in documents]))
        self.num_tokens += len(flat)

    def finish(self, skipped: int, faults: Sequence[str]) -> None:
        """Write the offsets and then the index, and sync everything to disk."""
        _sync(self._file)
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths])
        with open(self.folder / OFFSETS, "xb") as file:
            np.save(file, np.cumsum(lengths), allow_pickle=False)
            _sync(file)
        offsets = (self.folder / OFFSETS).read_bytes()
        files = {
            TOKENS: FileEntry(
                bytes=self.num_tokens * self.dtype.itemsize, xxh3=self._hash.hexdigest()
            ),
            OFFSETS: FileEntry(bytes=len(offsets), xxh3=xxh3_128(offsets).hexdigest()),
        }
        index = Index(
            format=FORMAT,
            dtype="uint16" if self.dtype == np.uint16 else "uint32",
            num_tokens=self.num_tokens,
            num_documents=len(lengths) - 1,
            tokenizer=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            files=Files.model_validate(files),
            skipped=skipped,
            faults=list(faults),
        )
        with open(self.folder / INDEX, "xb") as file:
            file.write(index.model_dump_json(indent=1, by_alias=True).encode())
            _sync(file)
        sync_folder(self.folder)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
