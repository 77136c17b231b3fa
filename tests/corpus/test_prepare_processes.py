"""Preparation by several processes: the same bytes however many, and whatever kills them."""

import fcntl
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpus.corpora import (
    MarkedSource,
    content,
    corpus,
    made,
    parts_of,
    small_parts,  # noqa: F401
)
from trainer.engine.core.errors import DataError, EnvironmentFault, RecipeError, RunInUse
from trainer.engine.corpus import prepare
from trainer.engine.corpus.part_stores import PartStores
from trainer.engine.corpus.prepare import Preparation, prepare_folder
from trainer.engine.corpus.progress import TokenisingProgress, describe
from trainer.engine.corpus.store import TokenStore
from trainer.engine.corpus.tokenise import Tally
from trainer.engine.sources.configs import TextSource
from trainer.engine.sources.documents import Document
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.tokenizer import MaskedDocument

pytestmark = pytest.mark.usefixtures("small_parts")


def test_any_number_of_processes_makes_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text, whole")
    documents = [
        corpus(tmp_path),
        MarkedSource(on_error="skip"),
        TextSource(path=str(tmp_path / "text.txt")),
    ]
    first = content(made(tmp_path / "1", *documents, workers=1))
    assert {"tokens-00000.bin", "tokens-00004.bin", "learned-00000.bin"} <= set(first)
    for workers in (2, 3):
        assert content(made(tmp_path / str(workers), *documents, workers=workers)) == first


def test_the_tokens_are_those_of_every_document_one_by_one(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    store = TokenStore.open(made(tmp_path / "out", source, MarkedSource(on_error="skip")), None)
    expected: list[int] = []
    learned: list[bool] = []
    for document in [*source.documents(), *(d for p in range(6) for d in MarkedSource().read(p))]:
        if isinstance(document, str) and document:
            expected += [*document.encode(), 256]
            learned += [True] * (len(document.encode()) + 1)
        elif isinstance(document, MaskedDocument):
            expected += [*document.text.encode(), 256]
            marks = [
                any(a <= at < b for a, b in document.loss_ranges)
                for at in range(len(document.text))
            ]
            learned += [*marks, True]
    assert store.tokens.tolist() == expected
    assert store.loss_mask is not None
    assert store.loss_mask.tolist() == learned
    assert store.skipped == 6
    assert list(store.faults) == [f"somewhere: broken {part}" for part in range(6)]
    assert (store.tokens[store.offsets[1:] - 1] == 256).all()


def test_the_end_is_learned_only_if_the_text_is_to_its_end(tmp_path: Path) -> None:
    class Two(MarkedSource):
        def parts(self) -> Sequence[Any]:
            return [((0, 2),), ((2, 4),), ()]

        def read(self, part: Any) -> Iterator[Document]:
            yield MaskedDocument("abcd", part)

    store = TokenStore.open(made(tmp_path / "out", Two()), None)
    assert store.loss_mask is not None
    assert store.loss_mask.tolist() == [
        *(True, True, False, False, False),
        *(False, False, True, True, True),
        *(False, False, False, False, False),
    ]


def test_a_part_that_is_whole_is_kept_and_a_damaged_one_made_again(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    pieces = [(source, part) for part in source.parts()][:2]
    stores = PartStores(tmp_path / "parts", pieces, ByteTokenizer())
    stores.folder.mkdir()
    assert [stores.make(0), stores.make(0)] == [True, False]
    expected = content(stores.part_folder(0))
    for name in expected:
        file = stores.part_folder(0) / name
        file.write_bytes(bytes(byte ^ 1 for byte in expected[name]))
        assert stores.make(0)
        assert content(stores.part_folder(0)) == expected


def test_parts_of_other_documents_are_not_used(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    source = corpus(tmp_path)
    stores = PartStores(work / "parts", [(MarkedSource(on_error="skip"), 0)], ByteTokenizer())
    stores.folder.mkdir(parents=True)
    stores.make(0)
    (work / "inputs").write_text("other")
    made(out, source)
    assert content(out) == content(made(tmp_path / "again", source))


def test_the_first_fault_in_order_is_the_one_that_is_named(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    lines = Path(source.path).read_bytes().splitlines(keepends=True)
    broken = [len(lines) // 2, len(lines) // 2 + 1, len(lines) - 1]
    for number in broken:
        lines[number] = b"{\n"
    Path(source.path).write_bytes(b"".join(lines))
    for workers in (1, 3):
        with pytest.raises(DataError) as error:
            made(tmp_path / "out", source, workers=workers)
        assert error.value.message.startswith(f"{source.path}:{broken[0] + 1}: not JSON")
        assert 'on_error = "skip"' in error.value.hint
    assert not (tmp_path / "out").exists()
    store = TokenStore.open(
        made(tmp_path / "out", source.model_copy(update={"on_error": "skip"})), None
    )
    assert [str(fault).split(":")[1] for fault in store.faults] == [
        str(number + 1) for number in broken
    ]


def test_a_process_that_is_killed_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Deadly(MarkedSource):
        def read(self, part: Any) -> Iterator[Document]:
            if part == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield "text"

    with pytest.raises(EnvironmentFault, match="killed"):
        made(tmp_path / "out", Deadly())
    assert len(parts_of(tmp_path / "out")) >= 1


def test_each_process_encodes_in_one_thread(tmp_path: Path) -> None:
    class Threads(MarkedSource):
        def read(self, part: Any) -> Iterator[Document]:
            yield os.environ.get("TOKENIZERS_PARALLELISM", "any number")

    store = TokenStore.open(made(tmp_path / "out", Threads()), None)
    assert bytes(store.tokens[: store.offsets[1] - 1].astype("uint8")) == b"false"


def test_a_source_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    source = corpus(tmp_path)

    class Changing(MarkedSource):
        def read(self, part: Any) -> Iterator[Document]:
            os.utime(source.path, ns=(part, part))
            yield "text"

        def fingerprint(self) -> str:
            return source.fingerprint()

    with pytest.raises(DataError, match="changed while it was tokenised"):
        made(tmp_path / "out", Changing())
    assert not (tmp_path / "out").exists()


def test_the_same_again_is_already_done_and_anything_else_is_refused(tmp_path: Path) -> None:
    source = corpus(tmp_path)
    out = made(tmp_path / "out", source)
    job = Preparation([source], ByteTokenizer(), "bytes", 2**16)
    assert not prepare_folder(job, out, lambda _: None)
    for other in (
        Preparation([MarkedSource()], ByteTokenizer(), "bytes", 2**16),
        Preparation([source], ByteTokenizer(), "bytes", 2**17),
    ):
        with pytest.raises(RecipeError, match="made from other documents or settings"):
            prepare_folder(other, out, lambda _: None)
    (out / "offsets.npy").unlink()
    with pytest.raises(RecipeError, match=r"offsets.npy: missing"):
        prepare_folder(job, out, lambda _: None)


def test_of_two_at_once_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "DYING_SECONDS", 0.0)
    job = Preparation([corpus(tmp_path)], ByteTokenizer())

    def second(_: TokenisingProgress) -> None:
        with pytest.raises(RunInUse):
            prepare_folder(job, tmp_path / "out", lambda _: None)

    assert prepare_folder(job, tmp_path / "out", second)


def test_a_lock_that_was_removed_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, out = Preparation([corpus(tmp_path)], ByteTokenizer()), tmp_path / "out"
    real = fcntl.flock

    def late(file: Any, kind: int) -> None:  # the one before has ended, a third has begun
        (tmp_path / ".out.lock").unlink()
        (tmp_path / ".out.lock").touch()
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(RunInUse, match="just now"):
        prepare_folder(job, out, lambda _: None)
    assert not out.exists()


def test_the_current_folder_can_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Preparation([corpus(tmp_path)], ByteTokenizer())
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert prepare_folder(job, Path(), lambda _: None)
    assert not prepare_folder(job, tmp_path / "out", lambda _: None)
    with pytest.raises(RecipeError, match="/ is there already"):
        prepare_folder(job, Path("/"), lambda _: None)


def test_a_folder_within_the_source_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    job = Preparation([TextSource(path=str(tmp_path))], ByteTokenizer())
    with pytest.raises(RecipeError, match="lies within a source"):
        prepare_folder(job, tmp_path / "out", lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    job = Preparation([corpus(tmp_path)], ByteTokenizer())
    with pytest.raises(EnvironmentFault, match="cannot write tokens to"):
        prepare_folder(job, tmp_path / "file" / "out", lambda _: None)


def test_progress_counts_what_was_made_and_what_is_left() -> None:
    progress = TokenisingProgress(parts=10, parts_done=4, parts_found=2)
    progress.started -= 6.0
    assert progress.seconds_left == pytest.approx(18.0, rel=0.1)
    assert TokenisingProgress(parts=10).seconds_left is None


def test_speeds_are_those_of_what_this_call_made() -> None:
    progress = TokenisingProgress(10, 4, 2, documents=1234, tokens=9 * 10**6)
    progress.new_tokens, progress.new_bytes = 6 * 10**6, 24 * 10**6
    progress.started -= 3.0
    assert describe(progress) == (
        "1,234 documents · 9.0 M tokens · 8.0 MB/s · 2.00 M tokens/s · eta 0:00:09"
    )


def test_a_tally_keeps_the_first_faults_only() -> None:
    tally = Tally()
    for number in range(50):
        tally.add(Tally(text_bytes=2, empty=1, skipped=1, faults=[str(number)]))
    assert (tally.text_bytes, tally.empty, tally.skipped) == (100, 50, 50)
    assert tally.faults == [str(number) for number in range(20)]


def test_offsets_are_where_the_ends_are(tmp_path: Path) -> None:
    store = TokenStore.open(made(tmp_path / "out", corpus(tmp_path)), None)
    assert np.array_equal(np.flatnonzero(store.tokens == 256) + 1, store.offsets[1:])
