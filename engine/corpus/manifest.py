"""Defines `tokens.json`, the manifest of a folder of tokens, and checks the files it lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar

from pydantic import Field, ValidationError, model_validator
from xxhash import xxh3_128, xxh3_128_hexdigest

from ..core.config import Count, CountOrZero, Table
from ..core.errors import DataError, EnvironmentFault
from ..core.files import open_regular
from ..sources.documents import DocumentFault

FORMAT: Final = 3
INDEX, OFFSETS = "tokens.json", "offsets.npy"
TOKENS, LEARNED = "tokens", "learned"
TOKENIZER_FOLDER = "tokenizer"
# A shard's bytes are a multiple of every machine's page size, so that shards can be mapped end to
# end; a token of the narrowest column takes one byte.
PAGE_TOKENS: Final = 2**16
# A hundred bytes a file: 10 TB in files of 128 MiB need 16 MB, and read they take 10 times that.
MAX_MANIFEST_BYTES = 2**24
READ_BYTES = 2**22
OTHER_FILE = r"(tokenizer/)?[A-Za-z0-9_][\w.-]*"


class TokenFileEntry(Table):
    """One file of a store."""

    bytes: CountOrZero
    xxh3: str


class PartEntry(Table):
    """Which part of a corpus a folder holds; see `trainer data prepare --part`."""

    number: Count
    """from 1"""
    of: Count
    inputs: str
    """`CorpusManifest.inputs` of the whole corpus"""
    contents: str
    """a hash of what the whole corpus is made from, equal on all machines"""


class CorpusManifest(Table):
    """`tokens.json`."""

    format: Literal[1, 2, 3]
    """before 3, neither `tokens.json` nor `others` had checksums"""
    dtype: Literal["uint16", "uint32"]
    num_tokens: CountOrZero
    num_documents: CountOrZero
    shard_tokens: Annotated[int, Field(ge=PAGE_TOKENS, le=2**53, multiple_of=PAGE_TOKENS)] = 2**53
    """tokens a file; the last has fewer"""
    learned: bool = False
    """whether the store has loss masks, in files of this name"""
    fingerprint: str = ""
    """xxh3-128 of all tokens; what a resumed run must find unchanged"""
    tokenizer: str
    """the tokenizer's fingerprint"""
    tokenizer_name: str = ""
    """the tokenizer's name in a recipe; its files are in the folder `tokenizer`"""
    vocab_size: Count
    eos_id: CountOrZero
    files: Annotated[dict[str, TokenFileEntry], Field(max_length=2**20)]
    others: Annotated[dict[str, TokenFileEntry], Field(max_length=100)] = {}
    """files beside the tokens, such as the tokenizer's"""
    text_bytes: CountOrZero = 0
    """of all documents that became tokens, duplicates too"""
    empty: CountOrZero = 0
    skipped: CountOrZero
    faults: Annotated[list[str | DocumentFault], Field(max_length=100)]
    duplicates: CountOrZero = 0
    """documents that were left out because the corpus has them already"""
    dedup: str = ""
    """how duplicates were found; empty: they were not looked for"""
    part: PartEntry | None = None
    sources: list[dict[str, Any]] = []
    """the sources' tables, as a recipe has them"""
    inputs: str = ""
    """a hash of everything that the tokens were made from"""

    @model_validator(mode="after")
    def _names_its_own_files(self) -> CorpusManifest:
        """Refuse files that the counts do not imply, so that no other file is ever opened."""
        if len(self.files) != 1 + self.num_shards * (1 + self.learned):
            raise ValueError(f"files: {len(self.files)}; not for {self.num_tokens} tokens")
        sizes = {OFFSETS: self.files[OFFSETS].bytes if OFFSETS in self.files else None}
        for column, width in self.columns():
            for number in range(self.num_shards):
                tokens = min(self.num_tokens - number * self.shard_tokens, self.shard_tokens)
                sizes[shard_name(column, number)] = tokens * width
        if sizes != {name: entry.bytes for name, entry in self.files.items()}:
            raise ValueError(f"files: not those of {self.num_tokens} tokens")
        for name in self.others:
            if name in (INDEX, *self.files) or not re.fullmatch(OTHER_FILE, name, re.ASCII):
                raise ValueError(f"others: {name!r} is not a file of the tokenizer's")
        return self

    @property
    def all_files(self) -> dict[str, TokenFileEntry]:
        """Return the entry of every file with a checksum, by its path in the folder."""
        return {**self.files, **self.others}

    @property
    def num_shards(self) -> int:
        """The number of files of a column."""
        return -(-self.num_tokens // self.shard_tokens)

    def columns(self) -> list[tuple[str, int]]:
        """Return the name of each column and the bytes that a token takes in it."""
        tokens = (TOKENS, 2 if self.dtype == "uint16" else 4)
        return [tokens, (LEARNED, 1)] if self.learned else [tokens]

    def shards(self, column: str) -> list[str]:
        """Return the names of a column's files, in order."""
        return [shard_name(column, number) for number in range(self.num_shards)]


def shard_name(column: str, number: int) -> str:
    """Return the name of a file of a column."""
    return f"{column}-{number:05d}.bin"


def serialize_manifest(manifest: Table) -> bytes:
    """Return the content of an index, whose first line is the XXH3-128 of the other lines."""
    body = manifest.model_dump_json(indent=1).encode().removeprefix(b"{\n")
    return _first_line(body) + body


def _first_line(body: bytes) -> bytes:
    return b'{"xxh3": "%s",\n' % xxh3_128_hexdigest(body).encode()


def read_manifest(folder: Path) -> CorpusManifest:
    """Read `tokens.json` and check that every file in it exists with the recorded size.

    Args:
        folder: the folder of the store.

    Raises:
        DataError: `tokens.json` is missing or malformed, or a file is missing or of another size.
        EnvironmentFault: `tokens.json` cannot be read.
    """
    manifest = read_index(folder / INDEX, _parse)
    require_files(folder, INDEX, manifest.all_files)
    return manifest


Index = TypeVar("Index", bound=Table)


def read_index(file: Path, parse: Callable[[Path, bytes], Index]) -> Index:
    """Read a file such as `tokens.json`, which describes a folder.

    Args:
        file: the file.
        parse: makes a table of the file's content.

    Raises:
        DataError: the file is missing or malformed.
        EnvironmentFault: the file cannot be read.
    """
    try:
        with open_regular(file) as opened:
            content = opened.read(MAX_MANIFEST_BYTES + 1)
        if len(content) > MAX_MANIFEST_BYTES:
            raise DataError(f"{file}: larger than {MAX_MANIFEST_BYTES >> 20} MiB")
        return parse(file, content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{file}: {error.strerror}", "a folder of tokens holds it") from error
    except OSError as error:
        raise EnvironmentFault(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise DataError(": ".join(filter(None, (str(file), key, said))), AGAIN) from error


def require_files(folder: Path, index: str, files: Mapping[str, TokenFileEntry]) -> None:
    """Check that every file of a folder exists with the size that the index says.

    Raises:
        DataError: a file is missing or of another size.
    """
    for name, entry in files.items():
        file = folder / name
        state = f"{file.stat().st_size} bytes" if file.is_file() else "missing"
        if state != f"{entry.bytes} bytes":
            raise DataError(f"{file}: {state}; {index} says {entry.bytes} bytes", AGAIN)


def _parse(file: Path, content: bytes) -> CorpusManifest:
    if not content.startswith(b'{"xxh3"'):
        manifest = CorpusManifest.model_validate_json(content)
        if manifest.format == FORMAT:
            raise DataError(f"{file}: its first line is not its checksum", AGAIN)
        return manifest
    return CorpusManifest.model_validate_json(verify_first_line(file, content))


def verify_first_line(file: Path, content: bytes) -> bytes:
    """Return the JSON below the first line, which is its checksum.

    Raises:
        DataError: the checksum differs.
    """
    seal, _, body = content.partition(b"\n")
    if seal + b"\n" != _first_line(body):
        raise DataError(f"{file}: its checksum differs", AGAIN)
    return b"{" + body


AGAIN = "prepare it again"


class FileList(Protocol):
    """An index of a folder."""

    @property
    def all_files(self) -> Mapping[str, TokenFileEntry]:
        """The size and checksum of each file, by its path in the folder."""


def find_damaged_files(folder: Path, manifest: FileList) -> Iterator[str]:
    """Read every file and yield the names of damaged and unreadable ones."""
    for name, entry in manifest.all_files.items():
        try:
            if hash_file(folder / name) != entry:
                yield name
        except OSError:
            yield name


def list_unchecked_files(manifest: CorpusManifest) -> list[str]:
    """Return the names of the files that have no checksum."""
    if manifest.format == FORMAT:
        return []
    return [INDEX, "tokenizer/"] if manifest.tokenizer_name else [INDEX]


def hash_file(file: Path) -> TokenFileEntry:
    """Return a file's size and checksum."""
    hashed, size = xxh3_128(), 0
    with open_regular(file) as opened:
        buffer = memoryview(bytearray(READ_BYTES))
        while count := opened.readinto(buffer):
            hashed.update(buffer[:count])
            size += count
    return TokenFileEntry(bytes=size, xxh3=hashed.hexdigest())
