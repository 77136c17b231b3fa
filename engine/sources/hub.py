"""Reads documents and records from local and hub datasets with the `datasets` library."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

from pydantic import model_validator

from ..core.config import RecipePath
from ..core.errors import DataError, EnvironmentFault, nearest
from ..core.files import read_regular
from ..core.registry import require_package
from .configs import RecordSource, sources
from .documents import PART_BYTES, Document, DocumentFault, Record, describe_missing_column
from .files import SAVED_SPLIT, SAVED_SPLITS, content_fingerprint
from .parquet import read_rows, read_texts, select_column, summarize_error

HUB_SECONDS = 20.0
# Rows of a batch: from a memory-mapped dataset, and from a streamed one.
BATCH_ROWS, STREAMED_ROWS = 4096, 256


Item = TypeVar("Item")


class DatasetShard(NamedTuple):
    """The rows `start` to `stop` of a dataset, or shard number `start` if `stop` is 0."""

    start: int
    stop: int = 0


@sources.register
class HFSource(RecordSource):
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
        """Return ranges of rows of about 16 MB, or the shards of a streamed dataset."""
        dataset = open_dataset(self)
        if not hasattr(dataset, "__len__"):
            return [DatasetShard(index) for index in range(dataset.num_shards)]
        rows = max(len(dataset) * PART_BYTES // max(dataset.data.nbytes, 1), 1)
        return [
            DatasetShard(start, min(start + rows, len(dataset)))
            for start in range(0, len(dataset), rows)
        ]

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a row."""
        return self.read_from(part, 0)

    def read_from(self, part: Any, first: int) -> Iterator[Document]:
        """Yield one document a row, without unpacking the rows before `first`."""

        def read_column(table: Any, row: int) -> Iterator[Document]:
            column = select_column(table, self.text_column)
            for chunk in getattr(column, "chunks", [column]):
                yield from read_texts(chunk, self.text_column, self._dataset, row)
                row += len(chunk)

        return self._read_part(part, first, read_column)

    def read_records(self, part: Any) -> Iterator[Record | DocumentFault]:
        """Yield one record a row; a class label is the name of its class."""

        def read_columns(table: Any, row: int) -> Iterator[Record | DocumentFault]:
            columns = self.columns_among(table.schema.names)
            for record in read_rows(table, columns, self._dataset, row):
                if isinstance(record, Record):
                    for field, names in classes.items():
                        record.values[field] = _name_classes(record.values[field], names)
                yield record

        classes = self._class_names(self._columns)
        return self._read_part(part, 0, read_columns)

    def _read_part(
        self, part: DatasetShard, first: int, read: Callable[[Any, int], Iterator[Item]]
    ) -> Iterator[Item | DocumentFault]:
        row = part.start if part.stop else 0
        skipped = first
        try:
            for table in _read_tables(open_dataset(self), part):
                unread = table.slice(skipped)
                row += table.num_rows - unread.num_rows
                skipped -= table.num_rows - unread.num_rows
                for item in read(unread, row):
                    yield item
                    row += 1
        except DataError:
            raise
        except Exception as error:  # what the library raises is as varied as its formats
            if not skipped:
                where = self._dataset if part.stop else f"{self._dataset}, shard {part.start}"
                yield DocumentFault(f"{where}, row {row + 1}", summarize_error(error))

    def _class_names(self, columns: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the names of the classes of each field whose column holds their numbers."""
        features = open_dataset(self).features or {} if columns else {}
        found = {}
        for field, column in columns.items():
            kind = features.get(column)
            names = getattr(getattr(kind, "feature", kind), "names", None)
            if names:
                found[field] = list(names)
        return found

    def fingerprint(self) -> str:
        """Return the hub's commit, the library's own hash, or a hash of the data files."""
        settings = f"{self.config} {self.split_name} {self.describe_columns()}"
        folder = self.folder()
        if folder is None:
            return f"{self.commit() or open_dataset(self)._fingerprint} {settings}"
        if not any((folder / name).is_file() for name in (SAVED_SPLIT, SAVED_SPLITS)):
            return f"{content_fingerprint(str(folder), '')} {settings}"
        if (folder / SAVED_SPLITS).is_file():
            folder = folder / self.split_name
        try:
            saved = json.loads(read_regular(folder / SAVED_SPLIT))["_fingerprint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder / SAVED_SPLIT}: {summarize_error(error)}") from error
        return f"{saved} {settings}"

    def folder(self) -> Path | None:
        """Return the local folder, or None for a dataset on the hub.

        Raises:
            DataError: the folder does not exist.
        """
        if not self.path:
            return None
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            hint = "a dataset of the hub is named with data.sources.repo"
            raise DataError(f"{folder}: no such folder", hint)
        return folder

    def commit(self) -> str:
        """Return the commit of the hub's dataset; empty if the library is set to be offline.

        Raises:
            DataError: the hub does not answer, or has no such dataset.
        """
        import_datasets()
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            info = HfApi().dataset_info(self.repo, revision=self.revision, timeout=HUB_SECONDS)
        except OfflineModeIsEnabled:
            return ""
        except Exception as error:  # of its HTTP library, which changes
            reason = summarize_error(error)
            raise DataError(
                f"{self.repo}: the Hugging Face hub gives no such dataset: {reason}",
                "check the name and the network; a local folder is named with data.sources.path",
            ) from error
        return str(info.sha)

    @property
    def _dataset(self) -> str:
        """The dataset's name in messages."""
        return self.path or self.repo

    def _check_name(self, key: str, name: str, known: Collection[str]) -> None:
        if name not in known:
            listed = ", ".join(sorted(known)[:10])
            what = key.removesuffix("_name")
            raise DataError(
                f'{self._dataset}: no {what} "{getattr(self, key)}"; there is: {listed}',
                nearest(name, known) or f"set data.sources.{key}",
            )


@lru_cache(maxsize=16)
def open_dataset(source: HFSource) -> Any:
    """Open a split of a dataset, reduced to the columns that are read.

    Raises:
        DataError: the dataset cannot be opened, or has no such split or column.
    """
    folder = source.folder()
    for path in folder.rglob("*") if folder else ():
        if not (path.is_file() or path.is_dir()):  # the library would wait for a fifo
            raise DataError(f"{path}: neither a regular file nor a folder")
    try:
        datasets = import_datasets()
        if folder and (folder / SAVED_SPLITS).is_file():
            splits = datasets.load_from_disk(str(folder))
            source._check_name("split_name", source.split_name, [*map(str, splits)])
            dataset = splits[source.split_name]
        elif folder and (folder / SAVED_SPLIT).is_file():
            dataset = datasets.load_from_disk(str(folder))
        else:
            datasets.disable_progress_bars()
            dataset = datasets.load_dataset(
                str(folder) if folder else source.repo,
                revision=None if folder else source.commit() or source.revision,
                name=source.config,
                split=source.split_name,
                streaming=source.streaming,
            )
    except (DataError, EnvironmentFault):
        raise
    except Exception as error:  # what the library raises is as varied as its formats
        raise DataError(f"{source._dataset}: {summarize_error(error)}") from error
    if dataset.column_names is not None:  # a streamed dataset may not know them
        try:
            wanted = source.columns_among(dataset.column_names) or {"text": source.text_column}
        except ValueError as error:
            raise DataError(f"{source._dataset}: {error}") from error
        columns = {field: column.split(".")[0] for field, column in wanted.items() if column}
        for field, column in columns.items():
            if column not in dataset.column_names:
                reason, _, hint = describe_missing_column(
                    column, field, dataset.column_names
                ).rpartition("; ")
                raise DataError(f"{source._dataset}: {reason}", hint)
        dataset = dataset.select_columns([*dict.fromkeys(columns.values())])
    return dataset.with_format("arrow")


def _name_classes(value: Any, names: Sequence[str]) -> Any:
    """Return the names of class numbers; -1, which stands for no label, is no class."""
    if isinstance(value, list):
        return [_name_classes(number, names) for number in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def import_datasets() -> Any:
    """Return the `datasets` package.

    Raises:
        EnvironmentFault: the package is not installed, or is older than version 4. Older versions
            run code from datasets.
    """
    datasets = require_package("datasets", 'the "hf" source', "data")
    if int(datasets.__version__.split(".")[0]) < 4:
        raise EnvironmentFault(
            f"datasets {datasets.__version__} may run code that comes with the data",
            'pip install "datasets>=4"',
        )
    return datasets


def _read_tables(dataset: Any, part: DatasetShard) -> Iterator[Any]:
    if not part.stop:
        shard = dataset.shard(num_shards=dataset.num_shards, index=part.start)
        yield from shard.iter(batch_size=STREAMED_ROWS)
        return
    rows = min(max((part.stop - part.start) // 16, 1), BATCH_ROWS)
    for start in range(part.start, part.stop, rows):
        yield dataset[start : min(start + rows, part.stop)]
