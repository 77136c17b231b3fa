"""A flipped bit in any file of a token store is found: by inspecting it, and by training on it."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.corpus.stores import read_described
from trainer.cli.data import app
from trainer.engine.core.errors import DataError, EnvironmentFault
from trainer.engine.corpus import checksums
from trainer.engine.corpus.checksums import RECORD, Share, is_shared, require_intact
from trainer.engine.corpus.configs import TokensSource
from trainer.engine.corpus.prepare import Preparation, prepare_folder
from trainer.engine.corpus.train_tokenizer import train_tokenizer
from trainer.engine.data.dataset import open_data
from trainer.engine.data.tables import Data
from trainer.engine.data.windows import open_window, window_folder
from trainer.engine.sources.chat import ChatSource
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.tokenizers.configs import HFTokenizer

FLIPS = 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return conversations as tokens in several files, with marks and a tokenizer beside them."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("store")
    draw = random.Random(0)
    lines = []
    for _ in range(600):
        words = ["".join(draw.choices("abcde", k=5)) for _ in range(80)]
        turns = [
            {"role": "user", "content": words[0]},
            {"role": "assistant", "content": " ".join(words)},
        ]
        lines.append(json.dumps({"messages": turns, "text": " ".join(words)}) + "\n")
    (folder / "chats.jsonl").write_text("".join(lines))
    path = str(folder / "chats.jsonl")
    trained, _ = train_tokenizer([JsonlSource(path=path)], folder / "bpe", vocab_size=300)
    tokenizer = HFTokenizer(path=str(folder / "bpe")).build()
    assert trained.fingerprint == tokenizer.fingerprint
    source = ChatSource(path=path, template="chatml").for_tokenizer(tokenizer)
    prepare_folder(Preparation([source], tokenizer, "hf", 2**16), folder / "tokens", lambda _: None)
    return folder / "tokens"


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "tokens"))


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def table(folder: Path, **keys: str) -> Data:
    source = TokensSource(path=str(folder), **keys)  # type: ignore[arg-type]
    return Data(seq_len=16, sources=[source], cache_dir=str(folder.parent / "cache"))


def train_on(folder: Path, **keys: str) -> None:
    open_data(table(folder, **keys), HFTokenizer(path=str(folder.parent / "bpe")).build(), 0)


def test_every_flip_in_every_file_is_found_by_inspect_and_by_training(
    store: Path, tmp_path: Path
) -> None:
    shutil.copytree(store.parent / "bpe", tmp_path / "bpe")
    names = sorted(p.relative_to(store).as_posix() for p in store.rglob("*") if p.is_file())
    kinds = {Path(name).stem.split("-")[0] for name in names}
    assert kinds >= {"tokens", "learned", "offsets", "tokenizer", "tokenizer_config"}
    assert len(names) >= 7
    draw = random.Random(1)
    for number in range(FLIPS):
        folder = Path(shutil.copytree(store, tmp_path / "tokens"))
        name = names[number % len(names)]
        flip(folder / name, draw.randrange((folder / name).stat().st_size * 8))
        result = CliRunner().invoke(app, ["inspect", str(folder)])
        if isinstance(result.exception, DataError):
            assert name in result.exception.message
        else:
            assert result.exit_code == 4
            assert f"damaged: {name} " in result.output
        with pytest.raises(DataError, match=Path(name).name):
            train_on(folder)
        shutil.rmtree(folder)


def test_an_intact_store_is_read_once_and_again_after_it_was_touched(
    copy: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = checksums.hash_file
    monkeypatch.setattr(
        checksums, "hash_file", lambda file: [read.append(file.name), real(file)][1]
    )
    shutil.copytree(store.parent / "bpe", copy.parent / "bpe")
    train_on(copy)
    assert len(read) == len(set(read)) == len([p for p in store.rglob("*") if p.is_file()]) - 1
    train_on(copy)
    assert len(read) == len(set(read))
    os.utime(copy / "offsets.npy")
    read.clear()
    train_on(copy)
    assert read == ["offsets.npy"]


def test_verify_never_leaves_it_to_inspect(copy: Path, store: Path) -> None:
    shutil.copytree(store.parent / "bpe", copy.parent / "bpe")
    flip(copy / "tokens-00000.bin", 99)
    train_on(copy, verify="never")
    with pytest.raises(DataError, match=r"tokens-00000.bin: does not hold what was written"):
        train_on(copy)


def test_the_record_of_a_store_that_cannot_be_written_is_in_the_cache(
    copy: Path, tmp_path: Path
) -> None:
    (copy / RECORD).mkdir()  # also for root, whom no permission stops
    cache = tmp_path / "cache"
    require_intact(copy, cache)
    (record,) = cache.iterdir()
    assert len(record.read_text().splitlines()) == len(read_described(copy)["files"]) + len(
        read_described(copy)["others"]
    )


def test_a_record_that_is_none_or_leads_elsewhere_is_not_used(copy: Path, tmp_path: Path) -> None:
    flip(copy / "tokens-00000.bin", 99)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for make in (os.mkfifo, lambda record: record.symlink_to(victim)):
        make(copy / RECORD)
        with pytest.raises(DataError, match=r"tokens-00000.bin"):
            require_intact(copy, tmp_path / "cache")
        (copy / RECORD).unlink()
    assert victim.read_text() == "mine"


def test_lines_cut_short_by_another_writer_cost_one_more_comparison(
    copy: Path, tmp_path: Path
) -> None:
    require_intact(copy, tmp_path)
    record = copy / RECORD
    lines = record.read_text().splitlines(keepends=True)
    record.write_text(lines[0][:-9] + "".join(lines[1:]))
    require_intact(copy, tmp_path)
    assert set(lines) <= set(record.read_text().splitlines(keepends=True))


def test_ranks_divide_the_files_and_machines_only_those_that_they_share(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"tokens-{number:05d}.bin" for number in range(10)]
    ranks = [Share(rank, 4, rank % 2, 2) for rank in range(4)]
    for shared, machines in ((True, [ranks]), (False, [ranks[:2], ranks[2:]])):
        monkeypatch.setattr(checksums, "is_shared", lambda folder, shared=shared: shared)
        for machine in machines:
            assert sorted(name for rank in machine for name in rank.of(copy, names)) == names
    device = os.stat(copy).st_dev
    mounts = tmp_path / "mountinfo"
    for kind, expected in (("nfs4", True), ("lustre", True), ("ext4", False), ("fuse", False)):
        number = f"{os.major(device)}:{os.minor(device)}"
        mounts.write_text(f"1 0 0:1 / / rw - proc proc rw\n9 1 {number} / /x rw - {kind} a rw\n")
        assert is_shared(copy, mounts) is expected
    assert not is_shared(copy, tmp_path / "absent")


def test_what_cannot_be_read_for_the_moment_is_not_called_damaged(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(file: Path) -> None:
        raise OSError(116, "Stale file handle", str(file))

    monkeypatch.setattr(checksums, "hash_file", stale)
    with pytest.raises(EnvironmentFault, match="Stale file handle"):
        require_intact(copy, tmp_path)


def test_a_damaged_cache_of_a_source_stops_the_run_and_names_the_file(tmp_path: Path) -> None:
    from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words " * 20}) + "\n")
    data = Data(
        seq_len=16,
        sources=[JsonlSource(path=str(tmp_path / "a.jsonl"))],
        cache_dir=str(tmp_path / "cache"),
    )
    open_data(data, ByteTokenizer(), 0)
    (file,) = (tmp_path / "cache").glob("*/tokens-00000.bin")
    flip(file, 99)
    with pytest.raises(DataError, match=r"tokens-00000.bin: does not hold what was written"):
        open_data(data, ByteTokenizer(), 0)
    shutil.rmtree(file.parent)
    open_data(data, ByteTokenizer(), 0)


def test_older_stores_are_opened_and_inspect_says_what_it_could_not_check(
    copy: Path,
) -> None:
    said = read_described(copy) | {"format": 2}
    del said["others"]
    (copy / "tokens.json").write_text(json.dumps(said))
    result = CliRunner().invoke(app, ["inspect", str(copy)])
    assert result.exit_code == 0
    assert "not checked: tokens.json and tokenizer/: an older version" in result.output
    require_intact(copy, copy.parent)


def test_a_flip_in_a_streams_window_has_it_made_again(tmp_path: Path) -> None:
    from trainer.engine.data.producer import Producer
    from trainer.engine.data.windows import Cursor, WindowReader
    from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words " * 20}) + "\n")
    source = JsonlSource(path=str(tmp_path / "a.jsonl"))
    (tmp_path / "windows").mkdir()
    producer = Producer(source, ByteTokenizer(), tmp_path / "windows", 16)
    producer.write_window(WindowReader(source, Cursor()), 0)
    folder = window_folder(tmp_path / "windows", 0)
    for name in ("place.json", "tokens.json", "tokens-00000.bin", "offsets.npy"):
        content = (folder / name).read_bytes()
        assert open_window(tmp_path / "windows", 0, ByteTokenizer()) is not None
        flip(folder / name, 100)
        assert open_window(tmp_path / "windows", 0, ByteTokenizer()) is None
        (folder / name).write_bytes(content)
