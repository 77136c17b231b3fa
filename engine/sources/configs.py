"""Data sources: their registry, the base classes of their tables, and the sources of files."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from xxhash import xxh3_128_hexdigest

from ..core.config import Component, CountOrZero, RecipePath
from ..core.errors import DataError
from ..core.registry import Registry
from ..tokenizers.tokenizer import Tokenizer
from .documents import Document
from .files import (
    content_fingerprint,
    files_fingerprint,
    read_objects,
    read_text,
    require_text,
    split_line_files,
    split_text_files,
)

# Installed packages, tests full of deliberately odd text, and a module that differs by machine.
PYTHON_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PYTHON_LEFT_OUT_PREFIX = "_sysconfigdata"


class SourceConfig(Component):
    """Base of every data source's table."""

    label: Annotated[str, Field(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,63})?$")] = ""
    """what metrics call this source, such as "books": its loss is `loss/books`; default: its number
    and name, such as "0.jsonl" """
    weight: Annotated[float, Field(gt=0)] = 1.0
    """share of the samples that come from this source, relative to the other sources"""
    split: Literal["train", "validation"] = "train"
    """what this source is used for; with no validation source, `data.validation_fraction` of
    each training source is held out"""


sources: Registry[SourceConfig] = Registry(
    "source",
    default="text",
    built_in={
        "python": "engine.sources.configs:PythonSource",
        "text": "engine.sources.configs:TextSource",
        "jsonl": "engine.sources.configs:JsonlSource",
        "tokens": "engine.corpus.configs:TokensSource",
        "synthetic": "engine.corpus.configs:SyntheticSource",
        "chat": "engine.sources.chat:ChatSource",
        "parquet": "engine.sources.parquet:ParquetSource",
        "hf": "engine.sources.hub:HFSource",
    },
)


class DocumentSource(SourceConfig):
    """Base of sources of text documents. They are tokenised once, into a cache on disk."""

    on_error: Literal["stop", "skip"] = "stop"
    """a document that cannot be read: "stop" with its file and line, or "skip" and count it"""

    @property
    def is_streamed(self) -> bool:
        """Whether the source is tokenised during training instead of before."""
        return bool(getattr(self, "streaming", False))

    def documents(self) -> Iterator[Document]:
        """Yield the documents in an order that depends on the source alone.

        A document that cannot be read is yielded as a `DocumentFault`. A subclass has either this
        method, or `parts` and `read`.
        """
        for part in self.parts():
            yield from self.read(part)

    def for_tokenizer(self, tokenizer: Tokenizer) -> DocumentSource:
        """Return the source with what it takes from the tokenizer, such as a chat template.

        It is called before `parts`, `read`, `documents` and `fingerprint`.
        """
        return self

    def parts(self) -> Sequence[Any]:
        """Return pieces for `read` that can be pickled: in order, together every document once.

        Where they are cut depends on the source alone. About 16 MB each is a good size: processes
        tokenise parts side by side, and an interrupted preparation resumes after the last part
        that was finished.
        """
        return [None]

    def read(self, part: Any) -> Iterator[Document]:
        """Yield the documents of a part."""
        return self.documents()

    def read_from(self, part: Any, first: int) -> Iterator[Document]:
        """Yield the documents of a part from number `first` on."""
        return islice(self.read(part), first, None)

    def fingerprint(self) -> str:
        """Return a text that changes whenever the documents may have changed."""
        raise NotImplementedError

    def content_fingerprint(self) -> str:
        """Return a text that identifies a stream's documents on every machine."""
        return self.fingerprint()


SourcePart = tuple[DocumentSource, Any]
"""one of the source's `parts`"""


@sources.register
class PythonSource(DocumentSource):
    """The interpreter's own standard library, one document a file: text every machine has."""

    name: Literal["python"] = "python"
    max_bytes: CountOrZero = 0
    """stop after this many bytes of text; 0 takes all"""

    def documents(self) -> Iterator[Document]:
        """Yield the library's modules, in a fixed scattered order."""
        total = 0
        for path, status in list_library_modules():
            total += status.st_size
            if self.max_bytes and total > self.max_bytes:
                return
            with suppress(OSError, UnicodeDecodeError):  # the user chose no file and can mend none
                yield Path(path).read_text(encoding="utf-8")

    def fingerprint(self) -> str:
        """Return the interpreter's version and the files' sizes and times."""
        states = [
            (path, status.st_size, status.st_mtime_ns) for path, status in list_library_modules()
        ]
        hashed = xxh3_128_hexdigest(repr(states).encode())
        return f"python {platform.python_version()} {self.max_bytes} {hashed}"


def list_library_modules() -> list[tuple[str, os.stat_result]]:
    """Return the path and status of each module of the standard library, in a fixed random order.

    The order follows a hash of the path within the library, so that any run of modules, such as the
    held-out tail, is a random sample.

    Raises:
        DataError: the library is not in a folder.
    """
    root = sysconfig.get_path("stdlib")
    if not os.path.isdir(root):
        raise DataError(
            f"{root}: this interpreter's standard library is not there as files",
            'use another source, such as "text"',
        )
    modules: list[tuple[bytes, str, os.stat_result]] = []
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name in PYTHON_LEFT_OUT or entry.name.startswith(PYTHON_LEFT_OUT_PREFIX):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    inside = Path(entry.path).relative_to(root).as_posix()
                    modules.append((blake2b(inside.encode()).digest(), entry.path, entry.stat()))
    return [(path, status) for _, path, status in sorted(modules, key=itemgetter(0))]


class FileSource(DocumentSource):
    """Base of sources that read files from disk."""

    path: RecipePath
    """a file, a folder or a glob; relative to the recipe"""
    streaming: bool = False
    """tokenise while training, a window of documents at a time, and keep no tokens; for what is
    too large to prepare, or to start at once"""
    suffix: ClassVar[str] = ""

    def fingerprint(self) -> str:
        """Return the files' names, sizes and times, and the settings."""
        return files_fingerprint(self.path, self.suffix) + self.settings()

    def content_fingerprint(self) -> str:
        """Return the files' names below their folder, sizes, first and last bytes, and settings."""
        return content_fingerprint(self.path, self.suffix) + self.settings()

    def settings(self) -> str:
        """Return the settings that change the documents, after a space."""
        return ""


@sources.register
class TextSource(FileSource):
    """Text files in UTF-8, one document a file."""

    name: Literal["text"] = "text"

    def parts(self) -> Sequence[Any]:
        """Return runs of files in the order of their names, and pieces of large ones."""
        return split_text_files(self.path, self.suffix)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a file."""
        return read_text(part)


@sources.register
class JsonlSource(FileSource):
    """JSON lines, one document a line."""

    name: Literal["jsonl"] = "jsonl"
    field: str = "text"
    """the key that holds the text"""
    suffix: ClassVar[str] = ".jsonl"

    def parts(self) -> Sequence[Any]:
        """Return runs of files in the order of their names, and whole lines of large ones."""
        return split_line_files(self.path, self.suffix)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a line."""
        return read_objects(part, lambda line: require_text(line, self.field))

    def settings(self) -> str:
        """Return the field."""
        return f" {self.field}"
