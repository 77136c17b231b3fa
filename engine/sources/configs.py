"""Data sources: their registry, the base classes of their tables, and the sources of files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from ..core.config import Component, RecipePath
from ..core.errors import RecipeError
from ..core.registry import Registry
from ..tokenizers.tokenizer import Tokenizer
from .documents import Document, DocumentFault, Record, text_of
from .files import (
    content_fingerprint,
    files_fingerprint,
    read_line_records,
    read_objects,
    read_text,
    require_text,
    split_line_files,
    split_text_files,
)


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

    def for_fields(self, fields: Sequence[str]) -> DocumentSource:
        """Return the source for a task that reads these fields with `read_records`.

        It is called before `parts`, `read_records` and `fingerprint`.

        Raises:
            RecipeError: the source has no records, or none with these fields.
        """
        raise RecipeError(
            f'the "{self.name}" source has no records with fields',
            'name a source of records, such as "jsonl", "parquet" or "hf"',
        )


sources: Registry[SourceConfig] = Registry(
    "source",
    default="text",
    built_in={
        "python": "engine.sources.python_library:PythonSource",
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

    def for_fields(self, fields: Sequence[str]) -> DocumentSource:
        """Return the source for a task that reads these fields, of which there is only the text.

        Raises:
            RecipeError: the task reads other fields.
        """
        others = [field for field in fields if field != "text"]
        if others:
            raise RecipeError(
                f'the "{self.name}" source has no field "{others[0]}": its documents are text',
                'records with fields come from "jsonl", "parquet" or "hf"',
            )
        return self

    def read_records(self, part: Any) -> Iterator[Record | DocumentFault]:
        """Yield the records of a part, in order: here each document is one with a text."""
        for number, document in enumerate(self.read(part), 1):
            if isinstance(document, DocumentFault):
                yield document
            else:
                yield Record({"text": text_of(document)}, f"{self.name}, document {number}")

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


class RecordSource(DocumentSource):
    """Base of sources whose samples have named fields: columns, or keys of an object."""

    field: str = "text"
    """the column that holds the text"""
    fields: dict[str, str] = {}
    """the column of each field of the task that has another name there, such as
    { text = "sentence" }; "" for a prompt that the records lack"""
    template: Literal["tokenizer", "chatml", "llama3"] = "tokenizer"
    """Jinja chat template of fields that hold messages: "tokenizer" takes the one in the
    tokenizer's files"""
    _columns: dict[str, str] = PrivateAttr({})
    _select: Callable[[Collection[str]], dict[str, str]] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _leaves_out_a_prompt_alone(self) -> Self:
        for field, column in self.fields.items():
            if not column and field != "prompt":
                raise ValueError(f'fields: "{field}" needs a column; only a prompt may be left out')
        return self

    # Tables are hashed to open a data set once; pydantic's hash refuses `fields`.
    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def for_fields(self, fields: Sequence[str]) -> Self:
        """Return the source for a task that reads these fields, each from its column."""
        source = self.model_copy()
        names = {"text": self.text_column, **self.fields}
        source._columns = {field: names.get(field, field) for field in fields}
        return source

    def select_known(self, select: Callable[[Collection[str]], dict[str, str]]) -> Self:
        """Return the source with fields that depend on the columns that a table has.

        Args:
            select: maps a table's columns to the column of each field, or raises ValueError.
        """
        source = self.model_copy()
        source._select = select
        return source

    def columns_among(self, known: Collection[str]) -> dict[str, str]:
        """Return the column of each field in a table that has these columns.

        Raises:
            ValueError: the table has not those that are needed.
        """
        return self._select(known) if self._select else self._columns

    @property
    def text_column(self) -> str:
        """The column that holds the text."""
        return self.fields.get("text", self.field)

    def template_settings(self) -> dict[str, Any]:
        """Return the arguments of `find_template` for fields that hold messages."""
        return {"name": self.template}

    def message_keys(self) -> tuple[str, str]:
        """Return the keys of a message that hold its role and its text."""
        return "role", "content"

    def describe_columns(self) -> str:
        """Return the settings that choose columns, for the fingerprint."""
        return f"{self._columns}" if self._columns else self.text_column


SourcePart = tuple[DocumentSource, Any]
"""one of the source's `parts`"""


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
    """Text files in UTF-8, one document a file; also .gz, .bz2, .xz and .zst."""

    name: Literal["text"] = "text"

    def parts(self) -> Sequence[Any]:
        """Return runs of files in the order of their names, and pieces of large ones."""
        return split_text_files(self.path, self.suffix)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a file."""
        return read_text(part)

    def read_records(self, part: Any) -> Iterator[Record | DocumentFault]:
        """Yield a record with a text for each document, with the name of its file."""
        for span in part:
            for document in read_text((span,)):
                if isinstance(document, DocumentFault):
                    yield document
                else:
                    yield Record({"text": text_of(document)}, span.file)


@sources.register
class JsonlSource(RecordSource, FileSource):
    """JSON lines, one document or record a line; also .gz, .bz2, .xz and .zst."""

    name: Literal["jsonl"] = "jsonl"
    field: str = "text"
    """the key that holds the text"""
    suffix: ClassVar[str] = ".jsonl"

    def parts(self) -> Sequence[Any]:
        """Return runs of files in the order of their names, and whole lines of large ones."""
        return split_line_files(self.path, self.suffix)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a line."""
        return read_objects(part, lambda line: require_text(line, self.text_column))

    def read_records(self, part: Any) -> Iterator[Record | DocumentFault]:
        """Yield one record a line."""
        return read_line_records(part, self._columns)

    def settings(self) -> str:
        """Return the keys that are read."""
        return f" {self.describe_columns()}"
