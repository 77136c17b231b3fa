"""Documents from the `datasets` library: folders that it saved, data files, and the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import model_validator

from ..core.config import RecipePath
from ..core.errors import DataError, EnvironmentFault, nearest
from ..core.files import read_regular
from .configs import DocumentSource, sources
from .documents import PART_BYTES, Document, DocumentFault
from .files import SAVED_SPLIT, SAVED_SPLITS, content_fingerprint
from .parquet import first_line, leaf, texts


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
        return hub_parts(self)

    def read(self, part: Any) -> Iterator[Document]:
        """Yield one document a row."""
        return self.read_from(part, 0)

    def read_from(self, part: Any, first: int) -> Iterator[Document]:
        """Yield one document a row, without unpacking what comes before."""
        return read_hub(self, part, first)

    def fingerprint(self) -> str:
        """Return the commit on the hub, or what the library or the files say of themselves."""
        return hub_fingerprint(self)


HUB_SECONDS = 20.0
# Rows that are taken at once: of what is mapped, and of what the library unpacks.
BATCH_ROWS, STREAMED_ROWS = 4096, 256


class DatasetShard(NamedTuple):
    """Rows of a dataset, or one of its shards where `stop` is 0."""

    start: int
    stop: int = 0


def libraries() -> Any:
    """Return the `datasets` package.

    Raises:
        EnvironmentFault: it is not installed, or older than version 4, which runs scripts.
    """
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFault(
            'the "hf" source needs the datasets package', 'pip install "trainer[data]"'
        ) from error
    if int(datasets.__version__.split(".")[0]) < 4:
        raise EnvironmentFault(
            f"datasets {datasets.__version__} may run code that comes with the data",
            'pip install "datasets>=4"',
        )
    return datasets


def _is_plain(path: Path) -> bool:
    return path.is_file() or path.is_dir()


@lru_cache(maxsize=16)
def open_dataset(source: HFSource) -> Any:
    """Return the split, with its one column.

    Raises:
        DataError: it cannot be opened, or has no such split or column.
    """
    folder = local_folder(source)
    odd = folder and next((each for each in folder.rglob("*") if not _is_plain(each)), None)
    if odd:  # the library would wait for a fifo
        raise DataError(f"{odd}: neither a regular file nor a folder")
    try:
        if folder and (folder / SAVED_SPLITS).is_file():
            splits = libraries().load_from_disk(str(folder))
            dataset = splits[_split(source, splits.keys())]
        elif folder and (folder / SAVED_SPLIT).is_file():
            dataset = libraries().load_from_disk(str(folder))
        else:
            dataset = _load(source, folder)
    except (DataError, EnvironmentFault):
        raise
    except Exception as error:  # what the library raises is as varied as its formats
        raise DataError(f"{place(source)}: {first_line(error)}") from error
    column = source.field.split(".")[0]
    names = dataset.column_names
    if names is not None and column not in names:
        known = ", ".join(sorted(names)[:10])
        raise DataError(
            f'{place(source)}: no field "{source.field}"; there is: {known}',
            nearest(column, names) or "set data.sources.field",
        )
    chosen = dataset if names is None else dataset.select_columns([column])
    return chosen.with_format("arrow")


def local_folder(source: HFSource) -> Path | None:
    """Return the folder that the source names; None for a dataset of the hub.

    Raises:
        DataError: it is not there.
    """
    if not source.path:
        return None
    folder = Path(source.path).expanduser()
    if not folder.is_dir():
        hint = "a dataset of the hub is named with data.sources.repo"
        raise DataError(f"{folder}: no such folder", hint)
    return folder


def place(source: HFSource) -> str:
    """Return what to call the source in messages."""
    return source.path or source.repo


def revision(source: HFSource) -> str:
    """Return the commit of a dataset on the hub; empty if the hub must not be asked.

    Raises:
        DataError: the hub does not answer, or has no such dataset.
    """
    libraries()
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = HfApi().dataset_info(source.repo, revision=source.revision, timeout=HUB_SECONDS)
    except OfflineModeIsEnabled:
        return ""
    except Exception as error:  # of its HTTP library, which changes
        raise DataError(
            f"{source.repo}: the Hugging Face hub gives no such dataset: {first_line(error)}",
            "check the name and the network; a local folder is named with data.sources.path",
        ) from error
    return str(info.sha)


def _load(source: HFSource, folder: Path | None) -> Any:
    datasets = libraries()
    datasets.disable_progress_bars()
    which: dict[str, str | None] = {"path": str(folder)} if folder else {"path": source.repo}
    if not folder:
        which["revision"] = revision(source) or source.revision
    return datasets.load_dataset(
        **which, name=source.config, split=source.split_name, streaming=source.streaming
    )


def _split(source: HFSource, splits: Any) -> str:
    if source.split_name not in splits:
        known = sorted(map(str, splits))
        raise DataError(
            f'{place(source)}: no split "{source.split_name}"; there is: {", ".join(known)}',
            nearest(source.split_name, known) or "set data.sources.split_name",
        )
    return source.split_name


def hub_parts(source: HFSource) -> list[DatasetShard]:
    """Return runs of rows of about 64 MB; of what the library streams, its shards."""
    dataset = open_dataset(source)
    if not hasattr(dataset, "__len__"):
        return [DatasetShard(index) for index in range(dataset.num_shards)]
    rows = max(len(dataset) * PART_BYTES // max(dataset.data.nbytes, 1), 1)
    return [
        DatasetShard(start, min(start + rows, len(dataset)))
        for start in range(0, len(dataset), rows)
    ]


def read_hub(source: HFSource, piece: DatasetShard, first: int = 0) -> Iterator[Document]:
    """Yield a document a row, from row `first` of the piece on."""
    name, row = place(source), piece.start if piece.stop else 0
    skipped = first
    try:
        for table in _tables(open_dataset(source), piece):
            unread = table.slice(skipped)
            row += table.num_rows - unread.num_rows
            skipped -= table.num_rows - unread.num_rows
            column = leaf(unread, source.field)
            for chunk in getattr(column, "chunks", [column]):
                for document in texts(chunk, source.field, name, row):
                    yield document
                    row += 1
    except DataError:
        raise
    except Exception as error:  # what the library raises is as varied as its formats
        if not skipped:
            where = name if piece.stop else f"{name}, shard {piece.start}"
            yield DocumentFault(f"{where}, row {row + 1}", first_line(error))


def _tables(dataset: Any, piece: DatasetShard) -> Iterator[Any]:
    if not piece.stop:
        shard = dataset.shard(num_shards=dataset.num_shards, index=piece.start)
        yield from shard.iter(batch_size=STREAMED_ROWS)
        return
    rows = min(max((piece.stop - piece.start) // 16, 1), BATCH_ROWS)
    for start in range(piece.start, piece.stop, rows):
        yield dataset[start : min(start + rows, piece.stop)]


def hub_fingerprint(source: HFSource) -> str:
    """Return what changes with the documents: the hub's commit, or the library's own hash."""
    which = f"{source.config} {source.split_name} {source.field}"
    folder = local_folder(source)
    if folder is None:
        commit = revision(source)
        return f"{commit or open_dataset(source)._fingerprint} {which}"
    if any((folder / name).is_file() for name in (SAVED_SPLIT, SAVED_SPLITS)):
        return f"{_saved_fingerprint(folder, source)} {which}"
    return f"{content_fingerprint(str(folder), '')} {which}"


def _saved_fingerprint(folder: Path, source: HFSource) -> str:
    if (folder / SAVED_SPLITS).is_file():
        folder = folder / source.split_name
    try:
        return str(json.loads(read_regular(folder / SAVED_SPLIT))["_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / SAVED_SPLIT}: {first_line(error)}") from error
