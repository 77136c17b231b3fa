"""`tokens.json`: what a folder of tokens holds, and whether its files are as it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, model_validator
from xxhash import xxh3_128

from ..config import Count, CountOrZero, Table
from ..errors import DataError, EnvironmentFault
from .configs import DocumentFault

FORMAT: Final = 2
INDEX, OFFSETS = "tokens.json", "offsets.npy"
TOKENS, LEARNED = "tokens", "learned"
# A shard's bytes are a multiple of every machine's page size, so that shards can be mapped end to
# end; a token of the narrowest column takes one byte.
PAGE_TOKENS: Final = 2**16
MAX_MANIFEST_BYTES = 2**26
READ_BYTES = 2**22


@dataclass
class Tally:
    """What was met while documents were read."""

    text_bytes: int = 0
    """bytes of text that became tokens"""
    empty: int = 0
    """documents left out because they hold nothing"""
    skipped: int = 0
    """documents left out because they cannot be read"""
    faults: list[str | DocumentFault] = field(default_factory=list)
    """what was wrong with the first of them"""

    def add(self, other: Tally, faults_kept: int = 20) -> None:
        """Count what came after it."""
        self.text_bytes += other.text_bytes
        self.empty += other.empty
        self.skipped += other.skipped
        self.faults += other.faults[: max(faults_kept - len(self.faults), 0)]


class FileEntry(Table):
    """One file of a store."""

    bytes: CountOrZero
    xxh3: str


class Manifest(Table):
    """`tokens.json`."""

    format: Literal[1, 2]
    dtype: Literal["uint16", "uint32"]
    num_tokens: CountOrZero
    num_documents: CountOrZero
    shard_tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=2**53, multiple_of=PAGE_TOKENS)] = 2**53
    """tokens a file; the last has fewer"""
    learned: bool = False
    """whether files say which tokens are learned from"""
    fingerprint: str = ""
    """xxh3-128 of all tokens; what a resumed run must find unchanged"""
    tokenizer: str
    """the tokenizer's fingerprint"""
    tokenizer_name: str = ""
    """what a recipe calls it; its files are in the folder `tokenizer`"""
    vocab_size: Count
    eos_id: CountOrZero
    files: Annotated[dict[str, FileEntry], Field(max_length=2**20)]
    text_bytes: CountOrZero = 0
    empty: CountOrZero = 0
    skipped: CountOrZero
    faults: Annotated[list[str | DocumentFault], Field(max_length=100)]
    sources: list[dict[str, Any]] = []
    """the sources' tables, as a recipe has them"""
    inputs: str = ""
    """a hash of all that it was made from"""

    @model_validator(mode="after")
    def _names_its_own_files(self) -> Manifest:
        """Refuse files that the counts do not ask for: names come from nowhere else."""
        if len(self.files) != 1 + self.num_shards * (1 + self.learned):
            raise ValueError(f"files: {len(self.files)}; not for {self.num_tokens} tokens")
        sizes = {OFFSETS: self.files[OFFSETS].bytes if OFFSETS in self.files else None}
        for column, width in self.columns():
            for number in range(self.num_shards):
                tokens = min(self.num_tokens - number * self.shard_tokens, self.shard_tokens)
                sizes[shard_name(column, number)] = tokens * width
        if sizes != {name: entry.bytes for name, entry in self.files.items()}:
            raise ValueError(f"files: not those of {self.num_tokens} tokens")
        return self

    @property
    def num_shards(self) -> int:
        """How many files a column has."""
        return -(-self.num_tokens // self.shard_tokens)

    def columns(self) -> list[tuple[str, int]]:
        """Return each column's name and its bytes a token."""
        tokens = (TOKENS, 2 if self.dtype == "uint16" else 4)
        return [tokens, (LEARNED, 1)] if self.learned else [tokens]

    def shards(self, column: str) -> list[str]:
        """Return the names of a column's files, in order."""
        return [shard_name(column, number) for number in range(self.num_shards)]


def shard_name(column: str, number: int) -> str:
    """Return what a file of a column is called."""
    return f"{column}-{number:05d}.bin"


def read_manifest(folder: Path) -> Manifest:
    """Return what `tokens.json` says, when every file that it names has its size.

    Raises:
        DataError: something is missing, malformed or of another size.
        EnvironmentFault: it cannot be read.
    """
    file = folder / INDEX
    try:
        with open(file, "rb") as opened:
            content = opened.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            raise DataError(f"{file}: larger than {MAX_MANIFEST_BYTES >> 20} MiB")
        manifest = Manifest.model_validate_json(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{file}: {error.strerror}", "a folder of tokens holds it") from error
    except OSError as error:
        raise EnvironmentFault(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise DataError(": ".join(filter(None, (str(file), key, said))), AGAIN) from error
    for name, entry in manifest.files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry.bytes:
            found = "missing" if size is None else f"{size} bytes"
            raise DataError(f"{folder / name}: {found}; {INDEX} says {entry.bytes} bytes", AGAIN)
    return manifest


AGAIN = "prepare it again"


def damaged_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Read every file; yield those whose bytes are not what was written."""
    for name, entry in manifest.files.items():
        hashed = xxh3_128()
        with suppress(OSError), open(folder / name, "rb") as file:
            while block := file.read(READ_BYTES):
                hashed.update(block)
        if hashed.hexdigest() != entry.xxh3:
            yield name
