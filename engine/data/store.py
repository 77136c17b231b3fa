"""A corpus as one long array of tokens on disk, memory-mapped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from ..errors import DataError
from .tokenizer import Ids, Tokenizer

FORMAT = 1
TOKENS, OFFSETS, INDEX = "tokens-00000.bin", "offsets.npy", "tokens.json"


@dataclass(frozen=True)
class TokenStore:
    """Documents as tokens.

    Attributes:
        tokens: [num_tokens] uint16 or uint32; each document is followed by the eos token.
        offsets: [num_documents + 1] int64; where each document starts.
        eos_id: the end-of-document token.
        vocab_size: every token is below it.
        fingerprint: xxh3-128 of the tokens' bytes.
        skipped: documents left out because they could not be read.
        faults: what was wrong with the first of them.
        place: what to call it in messages.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    eos_id: int
    vocab_size: int
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
        if index["tokenizer"] != tokenizer.fingerprint:
            raise DataError(
                f"{folder}: made with another tokenizer (vocabulary of {index['vocab_size']}; "
                f"the recipe's has {tokenizer.vocab_size})",
                "prepare it again with the recipe's tokenizer, or name the one it was made with",
            )
        for name, entry in index["files"].items():
            size = (folder / name).stat().st_size if (folder / name).is_file() else None
            if size != entry["bytes"]:
                raise DataError(
                    f"{folder / name}: {'missing' if size is None else f'{size} bytes'}; "
                    f"{INDEX} says {entry['bytes']} bytes",
                    "prepare it again",
                )
        tokens = np.memmap(folder / TOKENS, dtype=index["dtype"], mode="r")
        offsets = np.load(folder / OFFSETS, mmap_mode="r", allow_pickle=False)
        return TokenStore(
            # Plain arrays: slices of np.memmap run Python code each time.
            tokens=np.asarray(tokens).view(np.ndarray),
            offsets=np.asarray(offsets).view(np.ndarray),
            eos_id=index["eos_id"],
            vocab_size=index["vocab_size"],
            fingerprint=index["files"][TOKENS]["xxh3"],
            skipped=index["skipped"],
            faults=index["faults"],
            place=str(folder),
        )


def _read_index(folder: Path) -> dict[str, Any]:
    """Return tokens.json, checked."""
    file = folder / INDEX
    try:
        index: dict[str, Any] = json.loads(file.read_bytes())
        if index["format"] != FORMAT:
            raise DataError(f"{file}: format {index['format']}; this version reads {FORMAT}")
        well_formed = (
            index["dtype"] in ("uint16", "uint32")
            and set(index["files"]) == {TOKENS, OFFSETS}
            and index["num_tokens"] > 0
            and all(isinstance(index[key], int) for key in ("eos_id", "vocab_size", "skipped"))
        )
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", "a folder of tokens holds it") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file}: malformed: {type(error).__name__}: {error}") from error
    if not well_formed:
        raise DataError(f"{file}: malformed", "prepare it again")
    return index


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
        index = {
            "format": FORMAT,
            "dtype": self.dtype.name,
            "num_tokens": self.num_tokens,
            "num_documents": len(lengths) - 1,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "files": {
                TOKENS: {
                    "bytes": self.num_tokens * self.dtype.itemsize,
                    "xxh3": self._hash.hexdigest(),
                },
                OFFSETS: {"bytes": len(offsets), "xxh3": xxh3_128(offsets).hexdigest()},
            },
            "skipped": skipped,
            "faults": list(faults),
        }
        with open(self.folder / INDEX, "xb") as file:
            file.write(json.dumps(index, indent=1).encode())
            _sync(file)
        sync_folder(self.folder)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the folder's entries themselves survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
