"""Sources whose documents are the values of a column: Parquet files, and `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ..core.config import RecipePath
from .configs import DocumentSource, FileSource, sources
from .documents import Document


@sources.register
class ParquetSource(FileSource):
    """A column of text in Parquet files, one document a row (extra `[data]`)."""

    name: Literal["parquet"] = "parquet"
    field: str = "text"
    """the column that holds the text; dots lead into structs"""
    suffix: ClassVar[str] = ".parquet"

    def parts(self) -> Sequence[Any]:
        """Return runs of row groups."""
        from .parquet import parquet_parts

        return parquet_parts(self.path, self.suffix, self.field)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a row."""
        return self.read_from(part, 0)

    def read_from(self, part: Any, first: int) -> Iterator[Document]:
        """Yield one document a row, without reading what comes before."""
        from .parquet import read_parquet

        return read_parquet(part, self.field, first)

    def settings(self) -> str:
        """Return the field."""
        return f" {self.field}"


@sources.register
class HFSource(DocumentSource):
    """A dataset of Hugging Face's `datasets` library, local or on the hub (extra `[data]`)."""

    name: Literal["hf"] = "hf"
    path: RecipePath = ""
    """a folder that `save_to_disk` wrote, or a folder of data files; relative to the recipe"""
    repo: str = ""
    """a dataset on the hub, such as "allenai/c4"; instead of `path`"""
    config: str | None = None
    """the dataset's configuration (subset), such as "en"; none for a folder of `save_to_disk`"""
    split_name: str = "train"
    """which of the dataset's splits; what it is used for says `split`"""
    field: str = "text"
    """the column that holds the text; dots lead into structs"""
    revision: str | None = None
    """a commit, tag or branch of the hub's dataset; default: the newest commit"""
    streaming: bool = False
    """tokenise while training, a window of documents at a time, and download or keep no more than
    that; for what is too large to prepare, or to start at once"""

    @model_validator(mode="after")
    def _names_one_dataset(self) -> Self:
        if bool(self.path) == bool(self.repo):
            raise ValueError("give either path (a local folder) or repo (a dataset on the hub)")
        return self

    def parts(self) -> Sequence[Any]:
        """Return runs of rows, or the dataset's shards."""
        from .hub import hub_parts

        return hub_parts(self)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a row."""
        return self.read_from(part, 0)

    def read_from(self, part: Any, first: int) -> Iterator[Document]:
        """Yield one document a row, without unpacking what comes before."""
        from .hub import read_hub

        return read_hub(self, part, first)

    def fingerprint(self) -> str:
        """Return the commit on the hub, or what the library or the files say of themselves."""
        from .hub import hub_fingerprint

        return hub_fingerprint(self)
