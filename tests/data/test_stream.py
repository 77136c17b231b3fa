"""Streams: tokens made while training, in an order that nothing but the recipe decides."""

import json
import shutil
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest

from tests.cases import also
from tests.data.streams import (
    SEQ_LEN,
    TEXTS,
    expected_rows,
    opened,
    source_of,
    steps_of,
    table,
)
from trainer.engine.corpus.configs import SyntheticSource
from trainer.engine.data.loader import Loader
from trainer.engine.sources.chat import ChatSource
from trainer.engine.sources.parquet import ParquetSource

pytestmark = pytest.mark.usefixtures("small_windows")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet", "hf", "saved"])
def test_rows_are_those_of_windows_written_down(tmp_path: Path, kind: str, shuffle: bool) -> None:
    """Over the end of the source, where it begins again in another order."""
    source = source_of(kind, tmp_path / "corpus")
    data = table([source], tmp_path / "cache", shuffle=shuffle)
    train = opened(data).train
    batch = [row for step in islice(Loader(train, data, 0, 1).steps(0), 70) for row in step]
    got = np.concatenate([part.tokens.numpy() for part in batch])
    labels = np.concatenate([part.labels.numpy() for part in batch])
    rows = np.array(expected_rows(TEXTS, len(got), shuffle=shuffle))
    assert len(rows) * SEQ_LEN > 1.5 * sum(map(len, TEXTS))
    assert np.array_equal(got, rows[:, :-1])
    assert np.array_equal(labels, rows[:, 1:])


@pytest.mark.parametrize("packing", ["concat", "documents", "none"])
def test_ranks_together_read_what_one_reads(tmp_path: Path, packing: str) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache", packing=packing)
    alone = steps_of(data, 30)
    for ranks in (2, 3):
        shares = [steps_of(data, 30, rank=rank, ranks=ranks) for rank in range(ranks)]
        for step, expected in enumerate(alone):
            together = [share[step] for share in shares]
            assert sorted(row for rows in together for row in rows) == sorted(expected)


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("jsonl", "kept"),
        ("text", "gone"),
        ("saved", "kept"),
        *also(("jsonl", "gone"), ("text", "kept"), ("saved", "gone")),
        *also(*product(("parquet", "hf"), ("kept", "gone"))),
    ],
)
def test_a_saved_state_goes_on_at_the_next_sample(tmp_path: Path, kind: str, cache: str) -> None:
    data = table([source_of(kind, tmp_path / "corpus")], tmp_path / "cache")
    whole = steps_of(data, 60)
    for first in (1, 17, 44):
        train = opened(data).train
        for _ in islice(Loader(train, data, 0, 1).steps(0), first):
            pass
        state = json.loads(json.dumps(train.state(first * data.global_batch)))
        del train
        if cache == "gone":
            shutil.rmtree(tmp_path / "cache")
        assert steps_of(data, 15, first=first, state=state) == whole[first : first + 15]


def test_going_on_reads_nothing_before_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files before the one that the state names may be gone."""
    data = table([source_of("parquet", tmp_path / "corpus", TEXTS * 5)], tmp_path / "cache")
    train = opened(data).train
    for _ in islice(Loader(train, data, 0, 1).steps(0), 35):
        pass
    state = train.state(35 * data.global_batch)
    assert state["0.parquet"]["place"] > [0, 1, 0]
    del train
    expected = steps_of(data, 5, first=35, state=state)
    shutil.rmtree(tmp_path / "cache")
    first = tmp_path / "corpus" / "a.parquet"
    real = ParquetSource.read_from

    def watched(self: ParquetSource, part: object, number: int):
        assert part.file != str(first)
        return real(self, part, number)

    monkeypatch.setattr(ParquetSource, "read_from", watched)
    assert steps_of(data, 5, first=35, state=state) == expected


def test_without_a_state_any_step_is_found_by_reading_up_to_it(tmp_path: Path) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache")
    assert steps_of(data, 3, first=50) == steps_of(data, 53)[50:]


def test_going_back_gives_the_same_rows_again(tmp_path: Path) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache")
    loader = Loader(opened(data).train, data, 0, 1)
    wanted = [0, 1, 2, 30, 31, 2, 3, 31]
    got = {step: [tuple(map(bytes, loader.step(step).tokens)) for _ in "ab"] for step in wanted}
    whole = Loader(opened(data).train, data, 0, 1)
    assert got == {
        step: [tuple(map(bytes, whole.step(step).tokens))] * 2 for step in sorted(set(wanted))
    }


def test_streams_and_prepared_sources_mix_by_weight(tmp_path: Path) -> None:
    sources = [
        source_of("jsonl", tmp_path / "one", weight=3.0),
        SyntheticSource(num_documents=50, document_tokens=40, weight=2.0),
        source_of("parquet", tmp_path / "two", [text.upper() for text in TEXTS], weight=1.0),
    ]
    data = table(sources, tmp_path / "cache")
    whole = steps_of(data, 20)
    train = opened(data).train
    batches = [batch for step in islice(Loader(train, data, 0, 1).steps(0), 20) for batch in step]
    tokens = np.concatenate([batch.tokens.numpy() for batch in batches])
    lower = [np.isin(row, list(b"abcdefghij")).mean() > 0.3 for row in tokens]
    upper = [np.isin(row, list(b"ABCDEFGHIJ")).mean() > 0.3 for row in tokens]
    assert sum(lower) > 2 * sum(upper) > 0.2 * len(tokens)
    state = train.state(20 * data.global_batch)
    assert set(state) == {"0.jsonl", "2.parquet"}
    del train
    assert steps_of(data, 10, first=20, state=state) == steps_of(data, 30)[20:]
    assert steps_of(data, 20) == whole


def test_a_stream_of_conversations_learns_what_prepared_ones_do(tmp_path: Path) -> None:
    """The same rows, in another order."""
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"question {number}"},
                    {"role": "assistant", "content": "answer " * (number % 5 + 1)},
                ]
            }
        )
        for number in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    rows = []
    for streaming in (False, True):
        source = ChatSource(
            path=str(tmp_path / "chat.jsonl"), template="chatml", streaming=streaming
        )
        data = table(
            [source],
            tmp_path / "cache",
            packing="none",
            seq_len=200,  # a row a conversation
            global_batch=20,
            validation_fraction=0.0,
        )
        rows.append([row for step in steps_of(data, 2) for row in step])
    assert sorted(rows[0]) == sorted(rows[1])
    labels = np.frombuffer(rows[1][0][1600:3200], dtype=np.int64)
    assert 0 < (labels >= 0).sum() < 60
