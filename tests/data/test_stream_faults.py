"""Streams: what they leave on the disk, and what they do when something is wrong."""

import json
import os
import shutil
import signal
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.data.streams import (
    SEQ_LEN,
    TEXTS,
    WINDOW,
    expected_rows,
    opened,
    rows_of,
    source_of,
    steps_of,
    table,
)
from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.corpus.configs import SyntheticSource
from trainer.engine.data import stream
from trainer.engine.data.loader import Loader
from trainer.engine.data.windows import Cursor, WindowReader
from trainer.engine.recipe.load import load_recipe
from trainer.engine.sources.configs import JsonlSource, SourceConfig

pytestmark = pytest.mark.usefixtures("small_windows")


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
    reader = WindowReader(source, Cursor())
    places, found = [], []
    for _ in range(40):
        places.append(reader.cursor)
        found.append(list(reader.read(700)))
    assert [text for window in found[:20] for text in window][:250] == TEXTS[:250]
    for number in (0, 5, 21, 39):
        assert list(WindowReader(source, places[number]).read(700)) == found[number]
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
    "run.epochs=1": "the number of rows in an epoch of a stream is unknown",
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
