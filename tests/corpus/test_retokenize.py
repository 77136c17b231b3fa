"""Tokens that keep their tokenizer, and become those of another one."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.corpus.stores import read_described, write_described
from trainer.cli.data import app
from trainer.engine.core.errors import DataError, TrainerError
from trainer.engine.corpus import retokenize
from trainer.engine.corpus.manifest import read_manifest
from trainer.engine.corpus.prepare import open_source
from trainer.engine.corpus.retokenize import load_bundled_tokenizer
from trainer.engine.corpus.store import StoreWriter, TokenStore
from trainer.engine.corpus.tokenise import make_chunk
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.tokenizer import Tokenizer

TEXTS = [
    f"the {word} sat on the {other}\n" * 9 for word in ("cat", "hat") for other in ("mät", "☃")
]


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if isinstance(result.exception, TrainerError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, a tokenizer trained on it, and its tokens."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("corpus")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 20)
    (folder / "corpus.jsonl").write_text(lines)
    corpus = folder / "corpus.jsonl"
    run("train-tokenizer", corpus, "--vocab-size", 300, "--out", folder / "bpe")
    run(
        "prepare",
        corpus,
        "--tokenizer",
        "bpe",
        "--tokenizer-path",
        folder / "bpe",
        "--out",
        folder / "tokens",
    )
    return folder


def texts(place: Path, tokenizer: Tokenizer) -> list[str]:
    store = TokenStore.open(place, tokenizer)
    return [tokenizer.decode(store.tokens[a : b - 1].tolist()) for a, b in pairwise(store.offsets)]


def test_a_folder_of_tokens_rebuilds_its_tokenizer_wherever_it_is(
    folder: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder / "tokens", moved)
    tokenizer = load_bundled_tokenizer(moved)
    assert texts(moved, tokenizer) == TEXTS * 20
    assert read_manifest(moved).num_tokens < sum(len(text.encode()) for text in TEXTS) * 10


def test_tokens_become_those_that_the_text_has_with_the_other_tokenizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retokenize, "PART_TOKENS", 1000)
    monkeypatch.setattr(retokenize, "BATCH_DOCUMENTS", 7)
    run("retokenize", folder / "tokens", tmp_path / "bytes", "--tokenizer", "bytes")
    run("prepare", folder / "corpus.jsonl", "--out", tmp_path / "direct")
    through, direct = (TokenStore.open(tmp_path / name, None) for name in ("bytes", "direct"))
    assert through.tokens.tobytes() == direct.tokens.tobytes()
    assert through.offsets.tolist() == direct.offsets.tolist()
    back = ["--tokenizer-path", folder / "bpe", "--tokenizer", "bpe"]
    run("retokenize", tmp_path / "bytes", tmp_path / "back", *back)
    assert (tmp_path / "back" / "tokens-00000.bin").read_bytes() == (
        folder / "tokens" / "tokens-00000.bin"
    ).read_bytes()


def test_a_document_that_text_cannot_carry_is_named_or_left_out(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "tokens", ByteTokenizer()) as writer:
        documents = [b"good", b"not \xff utf-8", b"also good"]
        chunk = make_chunk(ByteTokenizer(), [np_bytes(each) for each in documents])
        writer.write(chunk)
        writer.finish(tokenizer_name="bytes")
    arguments = ["retokenize", tmp_path / "tokens", tmp_path / "out", "--tokenizer", "bytes"]
    with pytest.raises(DataError, match="document 1: its text does not give the same tokens"):
        run(*arguments)
    (row,) = run(*arguments, "--on-error", "skip")
    assert (row["num_documents"], row["skipped"]) == (2, 1)
    assert texts(tmp_path / "out", ByteTokenizer()) == ["good", "also good"]


def np_bytes(data: bytes) -> Any:
    import numpy as np

    return np.frombuffer(data, dtype=np.uint8)


def test_tokens_that_mark_what_is_learned_are_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "tokens", ByteTokenizer()) as writer:
        chunk = make_chunk(ByteTokenizer(), [np_bytes(b"ab")], [np_bytes(b"\0\1\1") == 1])
        writer.write(chunk)
        writer.finish(tokenizer_name="bytes")
    with pytest.raises(DataError, match="has loss masks, which text cannot hold"):
        run("retokenize", tmp_path / "tokens", tmp_path / "out", "--tokenizer", "bytes")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_name": ""}, "does not say which tokenizer"),
        ({"tokenizer_name": "../bpe"}, "which no installed package has"),
        ({"tokenizer_name": "bytes"}, "not the tokenizer that made the tokens"),
        ({"tokenizer": "0"}, "not the tokenizer that made the tokens"),
    ],
)
def test_a_manifest_that_names_another_tokenizer_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    write_described(tmp_path / "tokens", read_described(tmp_path / "tokens") | change)
    with pytest.raises(DataError, match=message):
        load_bundled_tokenizer(tmp_path / "tokens")


def test_a_kept_tokenizer_that_was_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tokens", tmp_path / "tokens")
    file = tmp_path / "tokens" / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    said = read_described(tmp_path / "tokens")
    said["others"]["tokenizer/tokenizer.json"]["bytes"] = file.stat().st_size
    write_described(tmp_path / "tokens", said)
    with pytest.raises(DataError, match="not the tokenizer that made the tokens"):
        load_bundled_tokenizer(tmp_path / "tokens")


def test_the_tokens_train_as_the_text_does(folder: Path, tmp_path: Path) -> None:
    """The folder's tokens are those of the source in the cache."""
    tokenizer = load_bundled_tokenizer(folder / "tokens")
    source = JsonlSource(path=str(folder / "corpus.jsonl"))
    cached = open_source(source, tokenizer, tmp_path)
    assert cached.fingerprint == TokenStore.open(folder / "tokens", tokenizer).fingerprint
