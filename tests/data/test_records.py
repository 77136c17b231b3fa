"""Samples that are records or items of a plugin's data set: order, split, batches, validation."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.corpus.configs import SyntheticSource
from trainer.engine.corpus.records.encode_records import RecordEncoding, longest_array
from trainer.engine.data.batch import Batch
from trainer.engine.data.collate import Collation, pad_arrays, stack_samples
from trainer.engine.data.loader import Loader, iterate_validation
from trainer.engine.data.records import RecordOpener, split_rows
from trainer.engine.data.tables import Data
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.sources.plugin_datasets import DatasetSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

SEQ_LEN = 16


@dataclass(frozen=True)
class TextBatch(Batch):
    labels: Tensor
    tokens: Tensor | None = None
    is_valid: Tensor | None = None
    sources: Tensor | None = None


def encode(values):
    return {"tokens": ByteTokenizer().encode(values["text"]), "label": values["label"]}


def collate(samples, length):
    tokens = pad_arrays((sample["tokens"] for sample in samples), length, -1)
    return {"tokens": tokens, "labels": np.stack([sample["label"] for sample in samples])}


COLLATION = Collation(collate, TextBatch, longest_array)
ENCODING = RecordEncoding(("text", "label"), encode)


def source(path: Path, first: int, count: int, **keys) -> JsonlSource:
    rows = [{"text": "x" * (n % SEQ_LEN), "label": n} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlSource(path=str(path), **keys)


def table(sources, tmp_path: Path, **keys) -> Data:
    keys = {"global_batch": 8, "micro_batch": 2, "validation_fraction": 0.0, **keys}
    return Data(seq_len=SEQ_LEN, sources=sources, cache_dir=str(tmp_path / "cache"), **keys)


def opened(data: Data, encoding=ENCODING, collation=COLLATION, seed=0):
    return RecordOpener(data, ByteTokenizer(), collation, encoding).open_data(seed)


def labels_of_steps(data, table, ranks, first=0, steps=10):
    """The labels of each step over all ranks, sorted."""
    found = []
    loaders = [Loader(data.train, table, rank, ranks).steps(first) for rank in range(ranks)]
    for _ in range(steps):
        batches = [batch for loader in loaders for batch in next(loader)]
        found.append(sorted(torch.cat([batch.labels for batch in batches]).tolist()))
    return found


def test_steps_hold_the_same_samples_on_any_number_of_ranks_and_resume(tmp_path: Path) -> None:
    sources = [source(tmp_path / "a.jsonl", 0, 50, weight=3.0), source(tmp_path / "b.jsonl", 50, 7)]
    keys = table(sources, tmp_path)
    data = opened(keys)
    alone = labels_of_steps(data, keys, 1)
    assert labels_of_steps(data, keys, 2) == labels_of_steps(opened(keys), keys, 4) == alone
    assert labels_of_steps(opened(keys), keys, 2, first=6, steps=4) == alone[6:]
    drawn = Counter(
        label < 50 for step in labels_of_steps(data, keys, 1, steps=100) for label in step
    )
    assert drawn[True] == pytest.approx(3 * drawn[False], rel=0.02)
    (batch, *_) = next(Loader(data.train, keys, 0, 1).steps(0))
    assert batch.sources.tolist() == [int(label >= 50) for label in batch.labels.tolist()]


def test_each_epoch_visits_each_record_once_in_another_order(tmp_path: Path) -> None:
    keys = table([source(tmp_path / "a.jsonl", 0, 40)], tmp_path)
    loader = Loader(opened(keys).train, keys, 0, 1).steps(0)
    steps = torch.stack([torch.cat([batch.labels for batch in next(loader)]) for _ in range(10)])
    first, second = steps.view(2, 40).tolist()
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    in_order = table(keys.sources, tmp_path, shuffle=False)
    loader = Loader(opened(in_order).train, in_order, 0, 1).steps(0)
    assert torch.cat([batch.labels for batch in next(loader)]).tolist() == list(range(8))


def test_rows_are_padded_to_seq_len_or_to_the_longest_of_the_step(tmp_path: Path) -> None:
    sources = [source(tmp_path / "a.jsonl", 0, 8)]
    for pad_to, length in ((0, 16), (1, 7), (4, 8), (64, 16)):
        keys = table(sources, tmp_path, pad_to=pad_to, shuffle=False)
        batches = next(Loader(opened(keys).train, keys, 0, 1).steps(0))
        assert {tuple(batch.tokens.shape) for batch in batches} == {(2, length)}
        tokens = torch.cat([batch.tokens for batch in batches])
        assert (tokens == ord("x")).sum(1).tolist() == list(range(8))


@pytest.mark.parametrize("count", [1, 7, 20])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_validation_counts_each_record_once_over_all_ranks(
    tmp_path: Path, count: int, ranks: int
) -> None:
    sources = [
        source(tmp_path / "a.jsonl", 0, 30),
        source(tmp_path / "b.jsonl", 100, count, split="validation"),
    ]
    keys = table(sources, tmp_path)
    validation = opened(keys).validation
    shares = [list(iterate_validation(validation, keys, 100, rank, ranks)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert {len(batch) for share in shares for batch in share} == {2}
    batches = [batch for share in shares for batch in share]
    valid = [batch.labels[batch.is_valid] for batch in batches]
    assert sorted(torch.cat(valid).tolist()) == list(range(100, 100 + count))
    filled = torch.cat([batch.labels[~batch.is_valid] for batch in batches])
    assert set(filled.tolist()) <= {-100}


def test_held_out_records_are_a_random_sample_that_no_seed_changes(tmp_path: Path) -> None:
    sources = [source(tmp_path / "a.jsonl", 0, 200)]
    keys = table(sources, tmp_path, validation_fraction=0.1)
    found = []
    for seed in (0, 1):
        data = opened(keys, seed=seed)
        assert (data.train.rows_per_epoch, data.validation.rows_per_epoch) == (180, 20)
        held_out = data.validation.batch(0, 20).labels.tolist()
        assert set(held_out) | set(data.train.batch(0, 180).labels.tolist()) == set(range(200))
        found.append(held_out)
    assert found[0] == found[1] == sorted(found[0])
    # A file that is sorted by label: the last tenth alone would be one class.
    assert 5 < sum(row < 100 for row in found[0]) < 15


def test_split_rows_holds_out_at_least_one_row_of_two() -> None:
    assert [len(part) for part in split_rows(2, 0.01)] == [1, 1]
    assert [len(part) for part in split_rows(1, 0.5)] == [1, 0]
    assert split_rows(5, 0.0)[0].tolist() == [0, 1, 2, 3, 4]


def test_what_is_cut_left_out_and_skipped_is_in_the_notes(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    texts = ["a", "b" * 20, "c" * 30, 5]
    file.write_text("".join(json.dumps({"text": t, "label": 1}) + "\n" for t in texts))

    def encode_text(values):
        if not isinstance(values["text"], str):
            raise ValueError('"text" is no text')
        return encode(values)

    reading = JsonlSource(path=str(file), on_error="skip")
    encoding = RecordEncoding(("text", "label"), encode_text)
    cut = opened(table([reading], tmp_path, on_long="truncate"), encoding)
    assert cut.notes == [
        f'0.jsonl: 3 records, 2 cut to data.seq_len, 1 skipped, such as {file}:4: "text" is no text'
    ]
    left = opened(table([reading], tmp_path, on_long="drop"), encoding)
    assert "1 records, 2 longer than data.seq_len left out, 1 skipped" in left.notes[0]
    with pytest.raises(DataError, match=r"a\.jsonl:2: 20 tokens; data\.seq_len is 16"):
        opened(table([reading], tmp_path), encoding)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = opened(table([source(tmp_path / "a.jsonl", 0, 9)], tmp_path)).fingerprint
    again = opened(table([source(tmp_path / "b.jsonl", 0, 9)], tmp_path)).fingerprint
    other = opened(table([source(tmp_path / "c.jsonl", 1, 9)], tmp_path)).fingerprint
    assert first == again != other
    assert first["0.jsonl"]["records"] == 9


def test_sources_that_give_no_records_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match='"synthetic" source has no records'):
        opened(table([SyntheticSource()], tmp_path))
    stream = source(tmp_path / "a.jsonl", 0, 9, streaming=True)
    with pytest.raises(RecipeError, match="is a stream") as error:
        opened(table([stream], tmp_path))
    assert "data.sources.0" in error.value.render()
    with pytest.raises(RecipeError, match="gives no samples"):
        opened(table([source(tmp_path / "a.jsonl", 0, 9)], tmp_path), encoding=None)


class Squares:
    """A map-style data set; its arrays are views that must not be written to."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == 13:
            raise KeyError("no such picture")
        image = torch.full((2, 3), float(index))
        return {"image": image, "labels": index**2, "points": np.arange(index % 4)}


class SquaresSource(DatasetSource):
    name: Literal["squares"] = "squares"
    size: int = 12
    held_out: int = 5

    def build(self, split):
        return Squares(self.size if split == "train" else self.held_out)


@dataclass(frozen=True)
class ImageBatch(Batch):
    image: Tensor
    labels: Tensor
    points: Tensor
    is_valid: Tensor | None = None
    sources: Tensor | None = None


def images(filler):
    return Collation(lambda samples, length: stack_samples(samples, filler), ImageBatch)


def test_a_data_set_of_a_plugin_gives_samples(tmp_path: Path) -> None:
    keys = table([SquaresSource(), SquaresSource(split="validation")], tmp_path, pad_to=4)
    data = opened(keys, None, images({"points": -1}))
    batch = data.train.batch(0, 12)
    numbers = batch.image[:, 0, 0]
    assert sorted(numbers.tolist()) == list(range(12))
    assert batch.image.shape == (12, 2, 3)
    assert batch.labels.tolist() == (numbers.long() ** 2).tolist()
    assert batch.points.shape == (12, 3)
    assert ((batch.points >= 0).sum(1) == numbers.long() % 4).all()
    assert batch.points.dtype == torch.int64
    assert data.validation.rows_per_epoch == 5
    assert data.notes == ["0.squares: 12 samples", "1.squares: 5 samples"]
    other = opened(table([SquaresSource(size=11)], tmp_path), None, images({"points": -1}))
    assert other.fingerprint["0.squares"] != data.fingerprint["0.squares"]


def test_samples_of_a_plugin_that_do_not_fit_are_named(tmp_path: Path) -> None:
    keys = table([SquaresSource()], tmp_path)
    with pytest.raises(DataError, match=r'"points" .* shapes \(0,\) and \(1,\)'):
        opened(keys, None, images({})).train.batch(0, 12)
    keys = table([SquaresSource(size=14)], tmp_path)
    with pytest.raises(DataError, match=r"0\.squares: sample 13: KeyError: 'no such picture'"):
        opened(keys, None, images({"points": -1})).train.batch(0, 14)
    with pytest.raises(DataError, match="the data set is empty"):
        opened(table([SquaresSource(size=0)], tmp_path), None, images({}))


def test_worker_processes_read_the_same_batches(tmp_path: Path) -> None:
    keys = table([source(tmp_path / "a.jsonl", 0, 50)], tmp_path)
    data = opened(keys)
    ahead = keys.model_copy(update={"workers": 1})
    assert labels_of_steps(data, ahead, 1, steps=3) == labels_of_steps(data, keys, 1, steps=3)
