"""Reads and writes token stores: a corpus as one memory-mapped array of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError, EnvironmentFault
from ..core.files import require_regular, sync_folder
from ..sources.documents import DocumentFault
from ..tokenizers.tokenizer import Tokenizer
from .columns import Column, FolderWriter, map_files, sync
from .manifest import (
    AGAIN,
    FORMAT,
    INDEX,
    LEARNED,
    OFFSETS,
    TOKENS,
    CorpusManifest,
    hash_file,
    read_manifest,
    serialize_manifest,
    shard_name,
)
from .tokenise import Chunk, LossMask, Tally, narrowest_dtype

SHARD_TOKENS = 2**28


@dataclass(frozen=True)
class TokenStore:
    """The tokens of documents, memory-mapped or in memory.

    Attributes:
        tokens: [num_tokens] uint16 or uint32; each document is followed by the eos token.
        offsets: [num_documents + 1] int64; where each document starts.
        eos_id: the end-of-document token.
        fingerprint: xxh3-128 of the tokens' bytes.
        skipped: the number of documents left out because they could not be read.
        faults: the reasons for the first skipped documents.
        place: the name of the store in messages.
        loss_mask: [num_tokens] bool; True for tokens that count in the loss as labels; None: all.
        folder: the folder of the files; None if the tokens are only in memory.
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    eos_id: int
    fingerprint: str
    skipped: int = 0
    faults: Sequence[str | DocumentFault] = ()
    place: str = "tokens"
    loss_mask: LossMask | None = None
    folder: Path | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens, eos tokens included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    @staticmethod
    def open(folder: Path, tokenizer: Tokenizer | None) -> TokenStore:
        """Memory-map a folder written by `StoreWriter`.

        Args:
            folder: the folder with `tokens.json`.
            tokenizer: the tokenizer that must have made the tokens; None accepts any.

        Raises:
            DataError: the folder is missing, incomplete, or made with another tokenizer.
            EnvironmentFault: a file cannot be read.
        """
        manifest = read_manifest(folder)
        if tokenizer is not None and manifest.tokenizer != tokenizer.fingerprint:
            raise DataError(
                f"{folder}: made with another tokenizer (vocabulary of {manifest.vocab_size}; "
                f"the recipe's has {tokenizer.vocab_size})",
                "prepare it again with the recipe's tokenizer, or name the one it was made with",
            )

        def column(name: str, dtype: str) -> NDArray[Any]:
            paths = [folder / shard for shard in manifest.shards(name)]
            return map_files(paths, np.dtype(dtype))

        try:
            return TokenStore(
                tokens=column(TOKENS, manifest.dtype),
                offsets=_read_offsets(folder / OFFSETS, manifest),
                eos_id=tokenizer.eos_id if tokenizer else manifest.eos_id,
                fingerprint=manifest.fingerprint or manifest.files[shard_name(TOKENS, 0)].xxh3,
                skipped=manifest.skipped,
                faults=manifest.faults,
                place=str(folder),
                loss_mask=column(LEARNED, "bool") if manifest.learned else None,
                folder=folder,
            )
        except OSError as error:
            raise EnvironmentFault(f"{folder}: {error.strerror}") from error


def _read_offsets(file: Path, manifest: CorpusManifest) -> NDArray[np.int64]:
    try:
        require_regular(file)
        offsets = np.asarray(np.load(file, mmap_mode="r", allow_pickle=False))
        fits = (
            offsets.dtype == np.int64
            and offsets.shape == (manifest.num_documents + 1,)
            and offsets[0] == 0
            and offsets[-1] == manifest.num_tokens
        )
    except (ValueError, EOFError, SyntaxError):
        fits = False
    if not fits:
        documents, tokens = manifest.num_documents, manifest.num_tokens
        raise DataError(f"{file}: not the offsets of {documents} documents, {tokens} tokens", AGAIN)
    return offsets


class StoreWriter(FolderWriter):
    """Writes a token store into a new folder; complete once `finish` has returned.

    Args:
        folder: the folder to create.
        tokenizer: the tokenizer, whose vocabulary bounds the ids and decides their dtype.
        shard_tokens: the number of tokens in a file, a multiple of `PAGE_TOKENS`.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        super().__init__(folder)
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self.tally = Tally()
        self.num_tokens = 0
        self.num_documents = 0
        self._lengths: list[NDArray[np.int64]] = []
        self._tokens = Column(folder, TOKENS, shard_tokens)
        self.to_close.callback(self._tokens.close)
        self._loss_mask: Column | None = None

    def write(self, chunk: Chunk) -> None:
        """Append documents and add their tally to the counts."""
        self.tally.add(chunk.tally)
        if chunk.loss_mask is not None and self._loss_mask is None:
            # The first masked document comes late: all tokens before it count in the loss.
            self._loss_mask = Column(self.folder, LEARNED, self.shard_tokens)
            self.to_close.callback(self._loss_mask.close)
            for start in range(0, self.num_tokens, 2**20):
                count = min(2**20, self.num_tokens - start)
                self._loss_mask.write(np.ones(count, dtype=bool))
        self._tokens.write(chunk.tokens)
        if self._loss_mask:
            all_tokens = np.ones(len(chunk.tokens), dtype=bool)
            self._loss_mask.write(all_tokens if chunk.loss_mask is None else chunk.loss_mask)
        self._lengths.append(chunk.lengths)
        self.num_tokens += len(chunk.tokens)
        self.num_documents += len(chunk.lengths)

    def finish(self, **described: Any) -> None:
        """Write the offsets and then the manifest, and sync all files to disk.

        Other files in the folder, such as the tokenizer's, get checksums in the manifest too.

        Args:
            described: further keys of the manifest.
        """
        columns = [column for column in (self._tokens, self._loss_mask) if column]
        for column in columns:
            column.end_file()
        files = {name: entry for column in columns for name, entry in column.files.items()}
        fingerprint = columns[0].hash
        if self._loss_mask:
            fingerprint.update(self._loss_mask.hash.digest())
        self._write_offsets()
        files[OFFSETS] = hash_file(self.folder / OFFSETS)
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        names = [path.relative_to(self.folder).as_posix() for path in paths]
        manifest = CorpusManifest(
            format=FORMAT,
            dtype="uint16" if narrowest_dtype(self.tokenizer) == np.uint16 else "uint32",
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            shard_tokens=self.shard_tokens,
            learned=self._loss_mask is not None,
            fingerprint=fingerprint.hexdigest(),
            tokenizer=self.tokenizer.fingerprint,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            files=files,
            others={name: hash_file(self.folder / name) for name in names if name not in files},
            **vars(self.tally),
            **described,
        )
        with open(self.folder / INDEX, "xb") as file:
            file.write(serialize_manifest(manifest))
            sync(file)
        sync_folder(self.folder)

    def _write_offsets(self) -> None:
        lengths = np.concatenate([np.zeros(1, dtype=np.int64), *self._lengths])
        with open(self.folder / OFFSETS, "xb") as file:
            np.save(file, np.cumsum(lengths), allow_pickle=False)
            sync(file)


Divide = Callable[[TokenStore, int, str], TokenStore | None]
"""takes the documents of a source, the token at which what is held out begins, and the source's
label; returns the documents that are trained on, or None without any"""
