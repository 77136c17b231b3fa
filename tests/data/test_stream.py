"""Streams: tokens made while training, in an order that nothing but the recipe decides."""

import json
import os
import random
import shutil
import signal
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from xxhash import xxh3_64_intdigest

from trainer.engine.data import stream, windows
from trainer.engine.data.batch import Batch
from trainer.engine.data.chat_configs import ChatSource
from trainer.engine.data.column_configs import HFSource, ParquetSource
from trainer.engine.data.configs import JsonlSource, SourceConfig, SyntheticSource, TextSource
from trainer.engine.data.dataset import OpenedData, open_data
from trainer.engine.data.loader import Loader
from trainer.engine.data.order import GOLDEN, mix, permute
from trainer.engine.data.tables import Data
from trainer.engine.data.tokenizer import ByteTokenizer
from trainer.engine.data.windows import Place, Reader
from trainer.engine.errors import DataError, RecipeError
from trainer.engine.recipe.load import load_recipe

SEQ_LEN, WINDOW = 16, 1000
CHANCE = random.Random(0)
TEXTS = [f"<{number}>" + "abcdefghij" * CHANCE.randrange(9) for number in range(300)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "FIRST_WINDOW", WINDOW)
    monkeypatch.setattr(windows, "LARGEST_WINDOW", 2 * WINDOW)
    monkeypatch.setattr(windows, "ROWS_A_WINDOW", 1)


def source_of(
    kind: str, folder: Path, texts: list[str] = TEXTS, **settings: object
) -> SourceConfig:
    """The texts in two files of a kind, as a streaming source."""
    folder.mkdir(exist_ok=True)
    for name, some in (("a", texts[:200]), ("b", texts[200:])):
        if kind == "jsonl":
            lines = [json.dumps({"text": text}) + "\n" for text in some]
            (folder / f"{name}.jsonl").write_text("".join(lines))
        elif kind == "parquet":
            pq.write_table(pa.table({"text": some}), folder / f"{name}.parquet", row_group_size=37)
        elif kind == "hf":
            Dataset.from_dict({"text": some}).to_parquet(folder / f"{name}.parquet")
        elif kind == "text":
            for number, text in enumerate(some):
                (folder / f"{name}{number:04d}.txt").write_text(text)
    if kind == "saved":
        Dataset.from_dict({"text": texts}).save_to_disk(folder)
    classes = {"jsonl": JsonlSource, "parquet": ParquetSource, "text": TextSource}
    made = classes.get(kind, HFSource)
    return made(path=str(folder), **{"streaming": True, **settings})


def table(sources: list[SourceConfig], cache: Path, **changes: object) -> Data:
    return Data.model_validate(
        {
            "seq_len": SEQ_LEN,
            "global_batch": 24,
            "micro_batch": 4,
            "sources": sources,
            "cache_dir": str(cache),
            "worker_timeout_seconds": 20,
            **changes,
        }
    )


def opened(data: Data, seed: int = 5) -> OpenedData:
    return open_data(data, ByteTokenizer(), seed, "run")


def steps_of(data: Data, count: int, *, first: int = 0, rank: int = 0, ranks: int = 1, state=None):
    """Rows of some steps as bytes."""
    train = opened(data).train
    train.restore(state or {})
    steps = islice(Loader(train, data, rank, ranks).steps(first), count)
    return [[row for batch in step for row in rows_of(batch)] for step in steps]


def rows_of(batch: Batch) -> list[bytes]:
    columns = [batch.tokens, batch.labels, batch.positions, batch.document_ids]
    arrays = [column.numpy() for column in columns if column is not None]
    return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(batch.tokens))]


def expected_rows(texts: list[str], count: int, *, shuffle: bool = True) -> list[list[int]]:
    """The first tokens of a stream as one would write it down: no files, processes or numpy."""
    rows: list[list[int]] = []
    number = 0
    key = xxh3_64_intdigest(b"5 0")
    while len(rows) < count:
        waiting = list(texts)
        while waiting:
            size = min(WINDOW << number, 2 * WINDOW)
            tokens: list[int] = []
            taken = 0
            while waiting and taken < size:
                taken += len(waiting[0])
                tokens += [*waiting.pop(0).encode(), 256]
            starts = range(0, len(tokens) - SEQ_LEN, SEQ_LEN)
            window = [tokens[start : start + SEQ_LEN + 1] for start in starts]
            if shuffle:
                keys = mix(np.array([(key + number * int(GOLDEN)) % 2**64], np.uint64))
                order = permute(
                    np.arange(len(window), dtype=np.uint64),
                    len(window),
                    np.repeat(keys, len(window)),
                )
                window = [window[int(index)] for index in order]
            rows += window
            number += 1
    return rows[:count]


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


@pytest.mark.parametrize("cache", ["kept", "gone"])
@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet", "hf", "saved"])
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


def test_disk_holds_a_few_windows_however_long_the_run(tmp_path: Path) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache")
    train = opened(data).train
    most = 0
    for _ in islice(Loader(train, data, 0, 1).steps(0), 150):
        (folder,) = (tmp_path / "cache" / "streams").iterdir()
        found = sorted(os.listdir(folder))
        most = max(most, len(found))
    last = int([name for name in found if name.isdecimal()][-1])
    assert last > 20
    assert most <= stream.AHEAD + stream.BEHIND + 5


def test_a_killed_tokeniser_is_replaced(tmp_path: Path) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache")
    whole = steps_of(data, 60)
    train = opened(data).train
    got = []
    for number, step in enumerate(islice(Loader(train, data, 0, 1).steps(0), 60)):
        got.append([row for batch in step for row in rows_of(batch)])
        if number % 20 == 10:
            os.kill(train.streams[0].child.pid, signal.SIGKILL)
    assert got == whole


def test_the_tokeniser_ends_with_its_samples(tmp_path: Path) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache")
    train = opened(data).train
    pid = train.streams[0].child.pid
    os.kill(pid, 0)
    del train
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_process_of_a_machine_tokenises_for_all(tmp_path: Path) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache")
    first, second = opened(data).train, opened(data).train
    assert first.streams[0].child
    assert second.streams[0].child is None
    loaders = [Loader(train, data, rank, 2).steps(0) for rank, train in enumerate((first, second))]
    for _ in range(40):
        for loader in loaders:
            next(loader)
    assert second.streams[0].child is None


def damaged(tmp_path: Path, on_error: str) -> tuple[SourceConfig, list[str]]:
    """A bad line after 150 good ones, and a second file that is no text at all."""
    source = source_of("jsonl", tmp_path / "corpus", on_error=on_error)
    file = tmp_path / "corpus" / "a.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:150], b'{"text": \n', *lines[150:]]))
    (tmp_path / "corpus" / "aa.jsonl").write_bytes(b"\xff\xfe\n" * 3)
    return source, TEXTS


def test_a_damaged_document_stops_the_run_where_it_is_needed(tmp_path: Path) -> None:
    source, _ = damaged(tmp_path, "stop")
    data = table([source], tmp_path / "cache", shuffle=False)
    before = sum(len(text) + 1 for text in TEXTS[:150]) // SEQ_LEN // data.global_batch
    steps = Loader(opened(data).train, data, 0, 1).steps(0)
    # The window with the fault is not there; those before it are.
    for _ in range(before - 2 * WINDOW // SEQ_LEN // data.global_batch - 1):
        next(steps)
    with pytest.raises(DataError, match=r"a\.jsonl:151: not JSON") as error:
        list(islice(steps, before))
    assert 'on_error = "skip"' in error.value.hint


def test_skipped_documents_change_no_other_and_resume_across_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, texts = damaged(tmp_path, "skip")
    data = table([source], tmp_path / "cache")
    train = opened(data).train
    batches = [batch for step in islice(Loader(train, data, 0, 1).steps(0), 60) for batch in step]
    got = np.concatenate([batch.tokens.numpy() for batch in batches])
    assert np.array_equal(got, np.array(expected_rows(texts, len(got)))[:, :-1])
    assert "a.jsonl:151: not JSON" in caplog.text
    del train
    whole = steps_of(data, 60)
    for first in (10, 14, 16, 30):
        train = opened(data).train
        for _ in islice(Loader(train, data, 0, 1).steps(0), first):
            pass
        state = train.state(first * data.global_batch)
        del train
        shutil.rmtree(tmp_path / "cache")
        assert steps_of(data, 12, first=first, state=state) == whole[first : first + 12]


def test_other_files_than_the_saved_ones_are_noticed(tmp_path: Path) -> None:
    """Names, sizes and both ends of the file are as they were."""
    source = source_of("jsonl", tmp_path / "corpus", TEXTS * 20)
    data = table([source], tmp_path / "cache")
    train = opened(data).train
    for _ in islice(Loader(train, data, 0, 1).steps(0), 130):
        pass
    state = train.state(130 * data.global_batch)
    del train
    file = tmp_path / "corpus" / "b.jsonl"
    assert state["0.jsonl"]["place"][1] == 0
    content = file.read_bytes()
    assert len(content) > 2**17
    changed = content[: 2**15] + content[2**15 : -(2**15)].replace(b"a", b"z") + content[-(2**15) :]
    file.write_bytes(changed)
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match="holds other tokens than when it was saved"):
        steps_of(data, 1, first=130, state=state)


def test_moved_files_are_the_same_stream(tmp_path: Path) -> None:
    data = table([source_of("jsonl", tmp_path / "corpus")], tmp_path / "cache")
    before = opened(data).fingerprint
    shutil.copytree(tmp_path / "corpus", tmp_path / "moved")
    moved = table([JsonlSource(path=str(tmp_path / "moved"), streaming=True)], tmp_path / "cache")
    assert opened(moved).fingerprint == before
    (tmp_path / "moved" / "b.jsonl").write_text('{"text": "other"}\n')
    assert opened(moved).fingerprint != before


def test_too_little_text_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    for texts, message in (([], "holds no text"), (["short"], "do not fill a row")):
        source = source_of("jsonl", tmp_path / "corpus", texts)
        data = table([source], tmp_path / "cache")
        with pytest.raises(DataError, match=message):
            steps_of(data, 1)


def test_a_cache_that_cannot_be_written_is_an_environment_fault(tmp_path: Path) -> None:
    source = source_of("jsonl", tmp_path / "corpus")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(Exception, match="cannot write tokens to") as error:
        opened(table([source], tmp_path / "cache"))
    assert "data.cache_dir" in error.value.hint


def test_nothing_is_held_out_of_a_stream_and_a_note_says_so(tmp_path: Path) -> None:
    source = source_of("jsonl", tmp_path / "corpus")
    alone = opened(table([source], tmp_path / "cache"))
    assert alone.validation is None
    assert any("no validation" in note for note in alone.notes)
    beside = SyntheticSource(num_documents=50, document_tokens=40, split="validation")
    both = opened(table([source, beside], tmp_path / "cache2"))
    assert both.validation is not None
    assert not any("no validation" in note for note in both.notes)


def test_abandoned_streams_are_removed_and_live_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = table([source_of("jsonl", tmp_path / "one")], tmp_path / "cache")
    two = table([source_of("text", tmp_path / "two")], tmp_path / "cache")
    steps_of(one, 1)
    live = opened(two)
    folders = {path.name.split("-")[0]: path for path in (tmp_path / "cache/streams").iterdir()}
    assert folders.keys() == {"jsonl", "text"}
    monkeypatch.setattr(stream, "ABANDONED_SECONDS", -1)
    third = opened(table([source_of("parquet", tmp_path / "three")], tmp_path / "cache"))
    assert not folders["jsonl"].exists()
    assert folders["text"].exists()
    del live, third


def test_a_reader_started_anywhere_reads_the_rest(tmp_path: Path) -> None:
    source = source_of("parquet", tmp_path / "corpus")
    reader = Reader(source, Place())
    places, found = [], []
    for _ in range(40):
        places.append(reader.place)
        found.append(list(reader.window(700)))
    assert [text for window in found[:20] for text in window][:250] == TEXTS[:250]
    for number in (0, 5, 21, 39):
        assert list(Reader(source, places[number]).window(700)) == found[number]
    assert all(before <= after for before, after in pairwise(places))


def test_training_begins_before_the_source_is_read(tmp_path: Path) -> None:
    """The first batch takes a window, not the corpus: a few of its bytes are ever read."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    line = json.dumps({"text": "x" * 1000}) + "\n"
    (folder / "a.jsonl").write_text(line * 40_000)
    data = table([JsonlSource(path=str(folder), streaming=True)], tmp_path / "cache")
    steps_of(data, 1)
    size = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.bin"))
    assert size < 2**17


REFUSED = {
    "run.epochs=1": "nobody knows how many rows an epoch of a stream has",
    "data.workers=2": "data.workers (2) do not read streams",
    'data.sources.0.split="validation"': "a validation source is read whole",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_a_stream_cannot_do_is_said_before_a_run(tmp_path: Path, setting: str) -> None:
    recipe = tmp_path / "recipe.toml"
    steps = "" if "epochs" in setting else "steps = 10"
    recipe.write_text(
        f'[run]\n{steps}\n[[data.sources]]\nname = "jsonl"\npath = "a.jsonl"\nstreaming = true\n'
        '[[data.sources]]\nname = "synthetic"\n'
    )
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, [setting])
    (problem,) = error.value.problems
    assert problem.key == "data.sources.0.streaming"
    assert problem.message == REFUSED[setting]
