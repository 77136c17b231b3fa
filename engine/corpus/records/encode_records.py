"""Encodes the records of a source once, into a record store of the cache."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from ...core.errors import DataError, RecipeError
from ...core.files import publish
from ...core.text.display import remove_secrets
from ...sources.chat_answers import holds_messages, render_answers
from ...sources.chat_renderer import ChatRenderer, ChatTemplate, find_template, open_renderer
from ...sources.configs import DocumentSource, RecordSource, SourcePart
from ...sources.documents import DocumentFault, Record
from ...tokenizers.tokenizer import Tokenizer
from ..cache import discard_other_inputs, open_or_make, unfinished_folder
from ..manifest import FileList
from ..part_stores import PartStores
from .record_manifest import read_record_manifest
from .record_store import RecordStore, Sample
from .record_writer import RecordTally, RecordWriter

# Part of the names in the cache: another number makes every source be encoded again.
CACHE_VERSION = 1
ON_LONG = 'raise data.seq_len, or set data.on_long = "truncate" or "drop"'

log = logging.getLogger(__name__)


def cut_arrays(sample: Sample, length: int) -> Sample:
    """Return a sample with the first `length` values of each 1-D array."""
    return {name: array[:length] if array.ndim else array for name, array in sample.items()}


def longest_array(sample: Sample) -> int:
    """Return the length of a sample's longest 1-D array."""
    return max((len(array) for array in sample.values() if array.ndim), default=0)


@dataclass(frozen=True)
class RecordEncoding:
    """How a task makes arrays of the records of its samples.

    Attributes:
        fields: the fields that each record has.
        encode: returns the arrays of a record, each 1-D or a number, always of the same names and
            dtypes; raises ValueError with the reason if the record's values are not as expected.
        settings: a text that changes whenever the same values may give other arrays.
        length: returns the number of tokens of a sample, which `data.seq_len` limits.
        truncate: returns a sample cut to a number of tokens.
        holds_answers: whether the fields prompt, chosen and rejected may hold messages, which are
            rendered with a chat template before they are encoded.
    """

    fields: tuple[str, ...]
    encode: Callable[[Mapping[str, Any]], Mapping[str, NDArray[Any] | int | float]]
    settings: str = ""
    length: Callable[[Sample], int] = longest_array
    truncate: Callable[[Sample, int], Sample] = cut_arrays
    holds_answers: bool = False


@dataclass(frozen=True)
class RecordPreparation:
    """Encodes the records of a source.

    Attributes:
        source: the source, prepared by `for_tokenizer` and `for_fields`.
        tokenizer: the tokenizer.
        encoding: makes the arrays.
        seq_len: the largest number of tokens of a sample.
        on_long: what happens to longer ones: "error", "truncate" or "drop".
    """

    source: DocumentSource
    tokenizer: Tokenizer
    encoding: RecordEncoding
    seq_len: int
    on_long: Literal["error", "truncate", "drop"] = "error"

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The template of messages; None if the tokenizer has none or no field holds messages."""
        if not self.encoding.holds_answers or not isinstance(self.source, RecordSource):
            return None
        try:
            return find_template(self.tokenizer, **self.source.template_settings())
        except RecipeError:
            return None

    def inputs(self) -> str:
        """Return a hash of everything that the arrays depend on."""
        template = self.template.fingerprint if self.template else ""
        source = f"{self.source.on_error} {self.source.fingerprint()}"
        encoding = (self.encoding.fields, self.encoding.settings, self.seq_len, self.on_long)
        inputs = (CACHE_VERSION, self.tokenizer.fingerprint, source, encoding, template)
        return xxh3_128_hexdigest(repr(inputs).encode())

    def encode_part(self, source: DocumentSource, part: Any, writer: RecordWriter) -> None:
        """Encode the records of a part of the source.

        Raises:
            DataError: a record cannot be read or encoded and `on_error` is "stop", or is too long
                and `on_long` is "error".
            RecipeError: a field holds messages, and there is no chat template.
        """
        with RecordEncoder(self, writer.tally) as encoder:
            for record in source.read_records(part):
                sample = encoder.encode(record)
                if sample is None or isinstance(record, DocumentFault):
                    continue
                try:
                    writer.add(sample)
                except ValueError as error:
                    encoder.skip(record.make_fault(str(error)))

    def open_renderer(self) -> AbstractContextManager[ChatRenderer]:
        """Open what renders fields that hold messages.

        Raises:
            RecipeError: there is no chat template.
        """
        if self.template is None:
            raise RecipeError(
                "fields of the data hold messages, and the tokenizer brings no chat template",
                'set the source\'s template ("chatml", "llama3"), or give plain text',
            )
        return open_renderer(self.template)


class RecordEncoder:
    """Encodes records one by one; a context, because messages are rendered by a process.

    Args:
        job: says how.
        tally: counts the records that are left out or cut.
    """

    def __init__(self, job: RecordPreparation, tally: RecordTally) -> None:
        self._job = job
        self._tally = tally
        self._stack = ExitStack()
        self._renderer: ChatRenderer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def encode(self, record: Record | DocumentFault) -> Sample | None:
        """Return the arrays of a record, of at most `seq_len` tokens; None: it is left out.

        Raises:
            DataError: the record cannot be read or encoded and `on_error` is "stop", or is too long
                and `on_long` is "error".
            RecipeError: a field holds messages, and there is no chat template.
        """
        if isinstance(record, Record):
            converted = self.convert(record)
            if not isinstance(converted, DocumentFault):
                return self.fit(converted, record)
            record = converted
        self.skip(record)
        return None

    def convert(self, record: Record) -> Sample | DocumentFault:
        """Return the arrays of a record, or a fault if it cannot be encoded.

        Raises:
            RecipeError: a field holds messages, and there is no chat template.
        """
        encoding, values = self._job.encoding, record.values
        try:
            if encoding.holds_answers and holds_messages(values):
                if self._renderer is None:
                    self._renderer = self._stack.enter_context(self._job.open_renderer())
                source = self._job.source
                assert isinstance(source, RecordSource), "only they give answers"
                values = render_answers(self._renderer, values, *source.message_keys())
            arrays = encoding.encode(values).items()
            return {name: np.asarray(array) for name, array in arrays}
        except ValueError as error:
            return record.make_fault(str(error))

    def fit(self, sample: Sample, record: Record) -> Sample | None:
        """Return a sample of at most `seq_len` tokens; None: it is left out.

        Raises:
            DataError: it is longer and `on_long` is "error".
        """
        encoding, seq_len = self._job.encoding, self._job.seq_len
        length = encoding.length(sample)
        if length <= seq_len:
            return sample
        if self._job.on_long == "error":
            place = record.make_fault("").place
            raise DataError(f"{place}: {length} tokens; data.seq_len is {seq_len}", ON_LONG)
        if self._job.on_long == "drop":
            self._tally.dropped += 1
            return None
        self._tally.truncated += 1
        return encoding.truncate(sample, seq_len)

    def skip(self, fault: DocumentFault) -> None:
        """Count a record that is left out.

        Raises:
            DataError: `on_error` is "stop".
        """
        if self._job.source.on_error == "stop":
            hint = 'repair it, or leave such records out with on_error = "skip"'
            raise DataError(str(fault), hint)
        self._tally.skip(fault)


@dataclass(frozen=True)
class RecordParts(PartStores):
    """The parts of a source as record stores.

    Attributes:
        job: encodes the records.
    """

    job: RecordPreparation

    def write(self, source: DocumentSource, part: Any, folder: Path) -> None:
        """Encode a part of the source into a new folder."""
        with RecordWriter(folder) as writer:
            self.job.encode_part(source, part, writer)
            writer.finish()

    def read_index(self, folder: Path) -> FileList:
        """Return the index of a part's folder."""
        return read_record_manifest(folder)


def open_or_encode(job: RecordPreparation, cache: Path) -> RecordStore:
    """Return the records of a source from the cache, and encode the source first if needed.

    If several processes need the same source, one encodes and the others wait for the lock.

    Raises:
        DataError: a record cannot be read or encoded, or is too long, or there are no records.
        EnvironmentFault: the cache cannot be written.
    """
    folder = cache / f"{job.source.name}-records-{job.inputs()}"
    return open_or_make(
        folder,
        lambda: RecordStore.open_folder(folder),
        lambda: _write(job, folder),
        remove_secrets(str(getattr(job.source, "path", ""))),
    )


def _write(job: RecordPreparation, folder: Path) -> None:
    """Encode a source into a folder, which appears under its name only when it is complete.

    Parts that an interrupted call with the same inputs finished are reused. The caller must hold
    the lock.
    """
    work, inputs, source = unfinished_folder(folder), job.inputs(), job.source
    discard_other_inputs(work, inputs)
    shutil.rmtree(work / "store", ignore_errors=True)
    parts: list[SourcePart] = [(source, part) for part in source.parts()]
    with RecordWriter(work / "store") as writer:
        if len(parts) == 1:  # a single part gains nothing from a worker process
            job.encode_part(*parts[0], writer)
        else:
            stores = RecordParts(work / "parts", parts, job.tokenizer, job)
            for number, _ in enumerate(stores.make_all(len(os.sched_getaffinity(0)))):
                writer.extend(RecordStore.open_folder(stores.part_folder(number)))
                log.info("encoding %s: part %d of %d", source.name, number + 1, len(parts))
        if not writer.num_records:
            tally = writer.tally
            left_out = f"{tally.skipped} skipped, {tally.dropped} too long"
            raise DataError(f'the "{source.name}" source holds no records ({left_out})')
        if job.inputs() != inputs:
            raise DataError(f'the "{source.name}" source changed while it was read', "run it again")
        writer.tally.faults = [str(fault) for fault in writer.tally.faults]
        writer.finish()
    publish(work / "store", folder)
    shutil.rmtree(work, ignore_errors=True)
