"""Opened data: the split, the mixture, and an order that ranks and resuming do not change."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.corpus.stores import random_lengths, store_of
from trainer.engine.core.errors import DataError
from trainer.engine.corpus.configs import SyntheticSource
from trainer.engine.corpus.store import TokenStore
from trainer.engine.data.batch import IGNORED, TokenBatch
from trainer.engine.data.dataset import OpenedData, Samples, open_data
from trainer.engine.data.holdout import split_point
from trainer.engine.data.loader import Loader, iterate_validation
from trainer.engine.data.order import TrainingOrder
from trainer.engine.data.packing import PACKINGS, ConcatRows
from trainer.engine.data.tables import Data
from trainer.engine.sources.configs import SourceConfig, TextSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

TWO_SOURCES: list[SourceConfig] = [
    SyntheticSource(num_documents=40, document_tokens=50, weight=3.0),
    SyntheticSource(num_documents=60, document_tokens=70, seed=1),
]


def table(packing: str = "concat", **changes: object) -> Data:
    return Data.model_validate(
        {
            "seq_len": 32,
            "global_batch": 24,
            "micro_batch": 4,
            "packing": packing,
            "validation_fraction": 0.2,
            "sources": TWO_SOURCES,
            **changes,
        }
    )


def opened(data: Data, seed: int = 0) -> OpenedData:
    return open_data(data, ByteTokenizer(), seed)


def rows_of(batches: list[TokenBatch]) -> list[tuple[bytes, ...]]:
    """Each row as bytes, columns together, in order."""
    rows = []
    for batch in (part for each in batches for part in (each.split(1) if each.ragged else [each])):
        columns = [batch.tokens, batch.labels, batch.positions, batch.document_ids]
        arrays = [column.numpy() for column in columns if column is not None]
        rows += [
            tuple(array[row].tobytes() for array in arrays) for row in range(len(batch.tokens))
        ]
    return rows


def steps_of(data: Data, rank: int, ranks: int, first: int, count: int) -> list[list[TokenBatch]]:
    return list(islice(Loader(opened(data).train, data, rank, ranks).steps(first), count))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_any_number_of_ranks_reads_the_same_samples_in_the_same_order(
    packing: str, ranks: int
) -> None:
    data = table(packing)
    alone = steps_of(data, 0, 1, first=0, count=5)
    shares = [steps_of(data, rank, ranks, first=0, count=5) for rank in range(ranks)]
    for step in range(5):
        micro_steps = zip(*(share[step] for share in shares), strict=True)
        dealt = [batch for micro_step in micro_steps for batch in micro_step]
        assert rows_of(dealt) == rows_of(alone[step])


@pytest.mark.parametrize("packing", PACKINGS)
def test_starting_at_any_step_continues_the_same_order(packing: str) -> None:
    data = table(packing)
    whole = steps_of(data, 1, 2, first=0, count=200)
    for first in (1, 7, 170):
        resumed = steps_of(data, 1, 2, first=first, count=3)
        assert [rows_of(step) for step in resumed] == [
            rows_of(step) for step in whole[first : first + 3]
        ]


def test_a_micro_batch_that_does_not_divide_the_share_leaves_a_smaller_one() -> None:
    data = table(global_batch=20, micro_batch=4)
    alone = rows_of(steps_of(data, 0, 1, 0, 1)[0])
    shares = [steps_of(data, rank, 2, 0, 1)[0] for rank in range(2)]
    assert [len(batch.tokens) for batch in shares[0]] == [4, 4, 2]
    dealt = [batch for pair in zip(*shares, strict=True) for batch in pair]
    assert rows_of(dealt) == alone


def test_the_seed_changes_the_order() -> None:
    data = table()
    first, second = (rows_of([opened(data, seed).train.batch(0, 8)]) for seed in (0, 1))
    assert first != second


def test_a_batch_is_its_samples_one_by_one() -> None:
    samples = opened(table("documents")).train
    together = rows_of([samples.batch(100, 20)])
    assert together == [rows_of([samples.batch(index, 1)])[0] for index in range(100, 120)]


def test_sources_are_mixed_by_their_weights() -> None:
    low, high = (store_of([4000], start=start) for start in (1, 100_000))
    packed = [ConcatRows(store, 0, store.num_tokens, 16) for store in (low, high)]
    order = TrainingOrder([source.num_rows for source in packed], [1, 3], 0, shuffle=True)
    samples = Samples(packed, order, vocab_size=2**20)
    from_high = (samples.batch(0, 4000).tokens.amax(1) >= 100_000).numpy()
    assert from_high.sum() == 3000
    prefixes = np.cumsum(from_high) - 0.75 * np.arange(1, 4001)
    assert np.abs(prefixes).max() <= 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_validation_holds_none_of_the_training_tokens(packing: str) -> None:
    store = store_of(random_lengths(80, 60))
    border = split_point(store, 0.1, seq_len=32)
    pack = PACKINGS[packing]
    parts = []
    for start, stop in ((0, border), (border, store.num_tokens)):
        packed = pack(store, start, stop, 32)
        rows = packed.gather(np.arange(packed.num_rows))
        parts.append({*rows.tokens.ravel().tolist(), *rows.labels.ravel().tolist()} - {0, IGNORED})
    assert parts[1]
    assert not parts[0] & parts[1]


def test_the_split_is_at_a_document_border_near_the_fraction() -> None:
    store = store_of(random_lengths(500, 60))
    border = split_point(store, 0.1, seq_len=32)
    assert border in store.offsets
    assert store.num_tokens - border == pytest.approx(0.1 * store.num_tokens, rel=0.5)


def test_one_long_document_is_split_inside() -> None:
    store = store_of([9999])
    assert split_point(store, 0.1, seq_len=32) == 9000


def test_a_source_of_one_row_is_all_for_training() -> None:
    store = store_of([40])
    assert split_point(store, 0.5, seq_len=32) == store.num_tokens


def test_at_least_one_row_is_held_out() -> None:
    store = store_of([9999])
    assert store.num_tokens - split_point(store, 1e-9, seq_len=32) == 33


def test_no_fraction_holds_out_nothing() -> None:
    assert opened(table(validation_fraction=0.0)).validation is None


def test_a_validation_source_replaces_the_held_out_tails(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a" * 1000)
    (tmp_path / "held_out.txt").write_text("b" * 1000)
    sources = [
        TextSource(path=str(tmp_path / "train.txt")),
        TextSource(path=str(tmp_path / "held_out.txt"), split="validation"),
    ]
    data = opened(table(sources=sources, cache_dir=str(tmp_path / "cache"), packing="none"))
    assert data.validation is not None
    train = data.train.batch(0, data.train.rows_per_epoch)
    validation = data.validation.batch(0, data.validation.rows_per_epoch)
    assert set(train.tokens[train.labels != IGNORED].tolist()) == {ord("a")}
    assert set(validation.tokens[validation.labels != IGNORED].tolist()) == {ord("b")}
    assert (train.labels != IGNORED).sum() == 1000


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("steps", [1, 2, 100])
def test_validation_is_the_same_for_any_number_of_ranks(packing: str, steps: int) -> None:
    data = table(packing)
    samples = opened(data).validation
    assert samples is not None
    alone = list(iterate_validation(samples, data, steps, 0, 1))
    learned = [row for row in rows_of(alone) if set(np.frombuffer(row[1], np.int64)) != {IGNORED}]
    assert len(learned) == min(steps * data.global_batch, samples.rows_per_epoch)
    assert len(set(learned)) == len(learned)  # nothing twice
    for ranks in (2, 3, 4):
        shares = [list(iterate_validation(samples, data, steps, r, ranks)) for r in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        dealt = rows_of([batch for turn in zip(*shares, strict=True) for batch in turn])
        again = [row for row in dealt if set(np.frombuffer(row[1], np.int64)) != {IGNORED}]
        assert again == learned


def test_validation_rows_are_those_of_the_split_in_order() -> None:
    data = table(sources=TWO_SOURCES[:1])
    samples = opened(data).validation
    assert samples is not None
    batches = list(iterate_validation(samples, data, 100, 0, 1))
    tokens = torch.cat([batch.tokens for batch in batches])[: samples.rows_per_epoch].ravel()
    store = TWO_SOURCES[0].open(ByteTokenizer(), Path())
    border = split_point(store, 0.2, 32)
    assert tokens.tolist() == store.tokens[border : border + len(tokens)].tolist()


def test_a_source_too_short_for_a_row_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    sources = [TextSource(path=str(tmp_path / "short.txt"))]
    with pytest.raises(DataError, match=r'"text" source has 6 tokens for train; a row needs 33'):
        opened(table(sources=sources, cache_dir=str(tmp_path)))


def test_only_validation_sources_is_an_error() -> None:
    source = SyntheticSource(split="validation")
    with pytest.raises(DataError, match="no source has split"):
        opened(table(sources=[source]))


def test_a_stored_token_outside_the_vocabulary_is_an_error_that_names_the_store() -> None:
    tokens = np.arange(1000, dtype=np.uint16) % 257
    tokens[500] = 300
    store = TokenStore(tokens, np.array([0, 1000]), 256, "", place="damaged/folder")
    packed = ConcatRows(store, 0, 1000, 9)
    samples = Samples([packed], TrainingOrder([packed.num_rows], [1], 0, shuffle=True), 257)
    with pytest.raises(DataError, match=r"damaged/folder: holds token 300; .* has 257"):
        samples.batch(0, packed.num_rows)


def test_the_fingerprint_follows_the_tokens_and_not_their_place(tmp_path: Path) -> None:
    fingerprints = []
    for folder, text in (("a", "same " * 99), ("b", "same " * 99), ("c", "other" * 99)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(text)
        sources = [TextSource(path=str(tmp_path / folder / "text.txt"))]
        data = opened(table(sources=sources, cache_dir=str(tmp_path / "cache")))
        fingerprints.append(data.fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_moving_to_a_device_keeps_every_column() -> None:
    batch = opened(table("documents")).train.batch(0, 2)
    moved = batch.to(torch.device("meta"))
    assert moved.document_ids is not None
    assert moved.document_ids.device.type == "meta"
    assert opened(table()).train.batch(0, 2).to(torch.device("cpu")).positions is None
