"""Batches of the records that a command names, dealt to the ranks in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from ..core.errors import DataError, RecipeError
from ..corpus.records.encode_records import RecordEncoder, RecordEncoding, RecordPreparation
from ..corpus.records.record_store import Sample
from ..corpus.records.record_writer import RecordTally
from ..data.batch import Batch
from ..data.collate import Collation
from ..data.record_samples import CollatedRows, DatasetRows
from ..sources.configs import DocumentSource, RecordSource, SourceConfig
from ..sources.documents import DocumentFault, Record
from ..sources.plugin_datasets import DatasetSource
from ..tasks.tables import LossConfig, TaskConfig
from ..tokenizers.tokenizer import Tokenizer

LONG_HINT = "raise --seq-len, or cut it with --on-long truncate"


@dataclass(frozen=True)
class ReadRecord:
    """A record as a sample.

    Attributes:
        values: the fields that the task reads.
        echoed: the fields that are written beside the prediction.
        sample: the arrays; None: the record cannot be read.
        fault: the place of a record that cannot be read, and why.
    """

    values: Mapping[str, Any]
    echoed: Mapping[str, Any]
    sample: Sample | None
    fault: str = ""


Waiting = Callable[[], ReadRecord]
"""reads and encodes a record, on the rank that needs it alone"""


@dataclass(frozen=True)
class DealtBatch:
    """This rank's share of as many batches as there are ranks.

    Attributes:
        records: of the batch; empty on a rank for which none is left.
        batch: the samples; None without any.
    """

    records: Sequence[ReadRecord]
    batch: Batch | None


@dataclass
class RecordBatches:
    """Batches of the records of some sources, in their order.

    Batches have the same records on any number of ranks, so that their results are the same.

    Attributes:
        task: says how records become samples.
        loss: the loss of the task.
        tokenizer: the tokenizer of the model.
        sources: the sources, in order.
        size: records of a batch.
        seq_len: the most tokens of a sample.
        on_long: what happens to longer ones, "error" or "truncate".
        is_labelled: whether records have what is to be predicted.
        echo: further fields to read.
        rank: of this process.
        ranks: how many deal batches to each other.
    """

    task: TaskConfig
    loss: LossConfig
    tokenizer: Tokenizer
    sources: Sequence[SourceConfig]
    size: int
    seq_len: int
    on_long: Literal["error", "truncate"] = "error"
    is_labelled: bool = False
    echo: Sequence[str] = ()
    rank: int = 0
    ranks: int = 1
    num_records: int = field(default=0, init=False)
    """records that were dealt so far"""

    def __post_init__(self) -> None:
        """Prepare the sources, so that what cannot be read is refused at once."""
        loss = self.loss if self.is_labelled else None  # predictions need nothing of a loss
        self.collation: Collation = self.task.build_collation(self.tokenizer, loss)
        self.prepared = [self._prepare(source) for source in self.sources]

    def _prepare(self, source: SourceConfig) -> DatasetSource | RecordPreparation:
        """Return a data set, or how the records of a source are encoded.

        Raises:
            RecipeError: the source has no records with the task's fields.
        """
        if isinstance(source, DatasetSource):
            if self.task.needs_language_model or self.echo:
                what = "--echo needs" if self.echo else f'the task "{self.task.name}" reads'
                raise RecipeError(f'{what} records, and "{source.name}" is a data set')
            return source
        encoding = self._choose_encoding(source)
        fields = [*encoding.fields, *(name for name in self.echo if name not in encoding.fields)]
        documents: DocumentSource = source.for_fields(fields).for_tokenizer(self.tokenizer)
        return RecordPreparation(documents, self.tokenizer, encoding, self.seq_len, self.on_long)

    def _choose_encoding(self, source: SourceConfig) -> RecordEncoding:
        """Return the encoding whose fields the first record of a source has."""
        encoding = self.task.build_encoding(self.tokenizer, is_labelled=self.is_labelled)
        single = None if self.is_labelled else self.task.build_single_encoding(self.tokenizer)
        if single is None or _has_fields(source, encoding) or not _has_fields(source, single):
            return encoding
        return single

    def fingerprint(self) -> str:
        """Return a text that changes whenever the records may have changed.

        Raises:
            DataError: a file is not there.
        """
        return " ".join(
            each.source.fingerprint() if isinstance(each, RecordPreparation) else each.fingerprint()
            for each in self.prepared
        )

    def deal(self, first: int = 0) -> Iterator[DealtBatch]:
        """Yield this rank's batches, equally many on each rank.

        Args:
            first: the first batch; those before are not read.

        Raises:
            DataError: a record cannot be read or is too long.
        """
        with ExitStack() as stack:
            records = islice(self._records(stack), first * self.size, None)
            while some := list(islice(records, self.size * self.ranks)):
                self.num_records += len(some)
                mine = [read() for read in some[self.rank * self.size :][: self.size]]
                yield DealtBatch(mine, self._collate(mine))

    def labelled(self, limit: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches, equally many on each rank; one may count nothing.

        Args:
            limit: the most records; 0 is all.

        Raises:
            DataError: a record cannot be read or is too long, or there is none.
        """
        self.num_records, chunk = 0, self.size * self.ranks
        with ExitStack() as stack:
            records = islice(self._records(stack), limit or None)
            # An even number at a time, so that partners are among them.
            while some := list(islice(records, 2 * chunk)):
                self.num_records += len(some)
                for first in range(0, len(some), chunk):
                    dealt = range(first, min(first + chunk, len(some)))
                    mine = dealt[self.rank * self.size :][: self.size]
                    # The forward pass has collectives that need every rank: one without a batch
                    # repeats the first one, without labels.
                    numbers = mine or dealt[: self.size]
                    found = [self._read_labelled(some, number) for number in numbers]
                    samples = [sample for sample in found if sample is not None]
                    if not samples:
                        raise DataError(f"none of {len(found)} records can be read")
                    rows = self._stack(samples)
                    rows.ignore(np.full(len(samples), not mine))
                    yield rows.to_batch()
        if not self.num_records:
            raise DataError("the data holds no records")

    def _read_labelled(self, some: Sequence[Waiting], number: int) -> Sample | None:
        """Return the sample of one of some records, with what it needs of its partner."""
        sample, add_partner = some[number]().sample, self.collation.add_partner
        if sample is None or add_partner is None:
            return sample
        partner = some[min(number ^ 1, len(some) - 1)]().sample
        return dict(add_partner(sample, partner or sample))

    def _collate(self, records: Iterable[ReadRecord]) -> Batch | None:
        samples = [each.sample for each in records if each.sample is not None]
        return self._stack(samples).to_batch() if samples else None

    def _stack(self, samples: Sequence[Sample]) -> CollatedRows:
        count = self.collation.length
        length = self.seq_len if count is None else min(max(1, *map(count, samples)), self.seq_len)
        return CollatedRows(self.collation.collate(samples, length), self.collation.batch_class)

    def _records(self, stack: ExitStack) -> Iterator[Waiting]:
        for job in self.prepared:
            if isinstance(job, DatasetSource):
                rows = DatasetRows(job.build(job.split), job.label or job.name)
                yield from (partial(_read_row, rows, index) for index in range(rows.num_rows))
                continue
            encoder = stack.enter_context(RecordEncoder(job, RecordTally()))
            for part in job.source.parts():
                for record in job.source.read_records(part):
                    yield partial(self._read, job, encoder, record)

    def _read(
        self, job: RecordPreparation, encoder: RecordEncoder, record: Record | DocumentFault
    ) -> ReadRecord:
        """Return a record with its sample.

        Raises:
            DataError: it cannot be read and the source's `on_error` is "stop", or it is too long.
        """
        sample: Sample | DocumentFault | None = None
        if isinstance(record, Record):
            values = {k: v for k, v in record.values.items() if k in job.encoding.fields}
            echoed = {name: record.values.get(name) for name in self.echo}
            sample = encoder.convert(record._replace(values=values))
            if not isinstance(sample, DocumentFault):
                return ReadRecord(values, echoed, _fit(encoder, sample, record))
        fault = record if isinstance(record, DocumentFault) else sample
        assert isinstance(fault, DocumentFault), "all else has a sample"
        if job.source.on_error == "stop":
            hint = 'repair it, or write its fault as a line with --set on_error="skip"'
            raise DataError(str(fault), hint)
        return ReadRecord({}, {}, None, str(fault))


def _has_fields(source: SourceConfig, encoding: RecordEncoding) -> bool:
    documents = source.for_fields(encoding.fields)
    with suppress(DataError):
        for part in documents.parts():
            for record in documents.read_records(part):
                return isinstance(record, Record)
    return False


def _fit(encoder: RecordEncoder, sample: Sample, record: Record) -> Sample | None:
    try:
        return encoder.fit(sample, record)
    except DataError as error:
        raise DataError(error.message, LONG_HINT) from None


def _read_row(rows: DatasetRows, index: int) -> ReadRecord:
    (sample,) = rows.read(np.array([index]))
    return ReadRecord({}, {}, dict(sample))


def share_columns(source: SourceConfig, other: Sequence[SourceConfig]) -> SourceConfig:
    """Return a source that finds its fields where the first source of records of others does.

    Args:
        source: the source; what it says itself stays.
        other: the sources of a recipe.
    """
    model = next((each for each in other if isinstance(each, RecordSource)), None)
    if model is None or not isinstance(source, RecordSource):
        return source
    keys = [key for key in ("field", "fields", "template") if key not in source.model_fields_set]
    return source.model_copy(update={key: getattr(model, key) for key in keys})
