"""The cache of tokens: made once, whole or absent, whoever asks and whatever kills them."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from tests.corpus.stores import read_described, write_described
from trainer.engine.core.errors import DataError, EnvironmentFault, RecipeError
from trainer.engine.corpus.cache import cache_folder, default_cache
from trainer.engine.corpus.configs import TokensSource
from trainer.engine.corpus.prepare import open_or_prepare, open_source
from trainer.engine.corpus.store import StoreWriter, TokenStore
from trainer.engine.corpus.tokenise import make_chunk
from trainer.engine.sources.configs import JsonlSource, TextSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.tokenizer import Ids


class CountingTokenizer(ByteTokenizer):
    calls = 0

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        self.calls += 1
        return super().encode_batch(texts)


class LargeTokenizer(ByteTokenizer):
    vocab_size = 70_000
    eos_id = 69_999
    fingerprint = "large"


class LyingTokenizer(ByteTokenizer):
    vocab_size = 100


def corpus(folder: Path, documents: int = 20) -> JsonlSource:
    file = folder / "corpus.jsonl"
    lines = (json.dumps({"text": f"document {number} " * 50}) for number in range(documents))
    file.write_text("\n".join(lines))
    return JsonlSource(path=str(file))


def stored(folder: Path) -> Path:
    (index,) = folder.glob("*/tokens.json")
    return index.parent


def test_the_second_time_nothing_is_tokenised(tmp_path: Path) -> None:
    tokenizer = CountingTokenizer()
    source = corpus(tmp_path)
    first = open_or_prepare(source, tokenizer, tmp_path / "cache")
    calls = tokenizer.calls
    second = open_or_prepare(source, tokenizer, tmp_path / "cache")
    assert tokenizer.calls == calls > 0
    assert np.array_equal(first.tokens, second.tokens)
    assert not list((tmp_path / "cache").glob("*.unfinished"))


def test_tokens_are_the_documents_each_followed_by_eos(tmp_path: Path) -> None:
    store = open_or_prepare(corpus(tmp_path, 3), ByteTokenizer(), tmp_path)
    expected = [[*(f"document {number} " * 50).encode(), 256] for number in range(3)]
    assert store.tokens.tolist() == list(chain(*expected))
    assert store.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert store.fingerprint == xxh3_128_hexdigest(store.tokens.tobytes())
    assert store.tokens.dtype == np.uint16


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    store = open_or_prepare(corpus(tmp_path, 3), LargeTokenizer(), tmp_path)
    assert store.tokens.dtype == np.uint32
    assert store.tokens[-1] == 69_999


def test_an_id_outside_the_vocabulary_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="id 256; its vocabulary has 100"):
        open_or_prepare(corpus(tmp_path), LyingTokenizer(), tmp_path / "cache")


def test_changed_files_and_settings_are_tokenised_again(tmp_path: Path) -> None:
    tokenizer = CountingTokenizer()
    source = corpus(tmp_path)
    stores = [open_or_prepare(source, tokenizer, tmp_path / "cache")]
    corpus(tmp_path, documents=21)
    for changed in (source, source.model_copy(update={"on_error": "skip"})):
        stores.append(open_or_prepare(changed, tokenizer, tmp_path / "cache"))
    assert [store.num_documents for store in stores] == [20, 21, 21]
    assert len(list((tmp_path / "cache").glob("*/tokens.json"))) == 3


@pytest.mark.parametrize("damage", ["truncate", "remove", "garble_index", "garble_offsets"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str) -> None:
    source = corpus(tmp_path)
    before = open_or_prepare(source, ByteTokenizer(), tmp_path / "cache").tokens.tolist()
    folder = stored(tmp_path / "cache")
    if damage == "truncate":
        os.truncate(folder / "tokens-00000.bin", 10)
    elif damage == "remove":
        (folder / "offsets.npy").unlink()
    elif damage == "garble_index":
        (folder / "tokens.json").write_text("{")
    else:
        size = (folder / "offsets.npy").stat().st_size
        (folder / "offsets.npy").write_bytes(bytes(size))
    assert open_or_prepare(source, ByteTokenizer(), tmp_path / "cache").tokens.tolist() == before


PREPARE = """
import sys, time
from pathlib import Path
from trainer.engine.sources.configs import JsonlSource
from trainer.engine.corpus.prepare import open_or_prepare
from trainer.engine.corpus import tokenise
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

tokenise.BATCH_DOCUMENTS = 1
class SlowTokenizer(ByteTokenizer):
    def encode_batch(self, texts):
        time.sleep(float(sys.argv[3]))
        print("tokenised", flush=True)
        return super().encode_batch(texts)
store = open_or_prepare(JsonlSource(path=sys.argv[1]), SlowTokenizer(), Path(sys.argv[2]))
print(store.fingerprint)
"""


def preparing(source: JsonlSource, cache: Path, seconds: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PREPARE, source.path, str(cache), str(seconds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_killed_while_tokenising_it_starts_afresh_with_the_same_result(tmp_path: Path) -> None:
    source, cache = corpus(tmp_path), tmp_path / "cache"
    for documents in (1, 5):
        process = preparing(source, cache, 0.02)
        assert process.stdout is not None
        for _ in range(documents):
            assert process.stdout.readline() == "tokenised\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not list(cache.glob("*/tokens.json"))
        assert list(cache.glob("*.unfinished"))
    store = open_or_prepare(source, ByteTokenizer(), cache)
    undisturbed = open_or_prepare(source, ByteTokenizer(), tmp_path / "other")
    assert store.tokens.tobytes() == undisturbed.tokens.tobytes()
    assert store.offsets.tolist() == undisturbed.offsets.tolist()
    assert not list(cache.glob("*.unfinished"))


def test_of_several_processes_one_tokenises(tmp_path: Path) -> None:
    source, cache = corpus(tmp_path), tmp_path / "cache"
    processes = [preparing(source, cache, 0.02) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(output.count("tokenised") for output in outputs) == [0, 0, 20]
    assert len({output[-1] for output in outputs}) == 1


@pytest.mark.parametrize("name", ["tokens.json", "tokens-00000.bin", "offsets.npy"])
def test_a_cache_that_cannot_be_read_for_the_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source, tokenizer = corpus(tmp_path), CountingTokenizer()
    open_or_prepare(source, tokenizer, tmp_path / "cache")
    calls = tokenizer.calls

    def stale(real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, *arguments: Any, **keywords: Any) -> Any:
            if str(file).endswith(name):
                raise OSError(errno.ESTALE, "Stale file handle")
            return real(file, *arguments, **keywords)

        return opened

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", stale(open))
        patch.setattr("os.open", stale(os.open))
        with pytest.raises(EnvironmentFault, match="Stale"):
            open_or_prepare(source, tokenizer, tmp_path / "cache")
    open_or_prepare(source, tokenizer, tmp_path / "cache")
    assert tokenizer.calls == calls


def test_a_cache_within_the_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    source = TextSource(path=str(tmp_path))
    with pytest.raises(RecipeError, match="lies within a source"):
        open_or_prepare(source, ByteTokenizer(), tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFault) as error:
        open_or_prepare(corpus(tmp_path), ByteTokenizer(), tmp_path / "file")
    assert str(tmp_path / "file") in str(error.value)
    assert "data.cache_dir" in error.value.hint


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache() == Path("/somewhere/trainer/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_cache() == Path("/home/me/.cache/trainer/tokens")


def test_opening_what_is_cached_takes_milliseconds(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(1000):
        (folder / f"{number}.txt").write_text("text")
    source = TextSource(path=str(folder))
    open_or_prepare(source, ByteTokenizer(), tmp_path / "cache")
    started = time.process_time()
    open_or_prepare(source, ByteTokenizer(), tmp_path / "cache")
    assert time.process_time() - started < 0.2


def written(folder: Path) -> Path:
    with StoreWriter(folder, ByteTokenizer()) as writer:
        chunk = make_chunk(ByteTokenizer(), ByteTokenizer().encode_batch(["one", "two"]))
        writer.write(chunk)
        writer.finish()
    return folder


def test_a_folder_of_tokens_is_a_source(tmp_path: Path) -> None:
    source = TokensSource(path=str(written(tmp_path / "tokens")))
    store = open_source(source, ByteTokenizer(), tmp_path)
    assert store.tokens.tolist() == [*b"one", 256, *b"two", 256]
    assert store.num_documents == 2


def test_tokens_of_another_tokenizer_are_refused_with_both_vocabularies(tmp_path: Path) -> None:
    folder = written(tmp_path / "tokens")
    with pytest.raises(DataError, match=r"another tokenizer \(vocabulary of 257; .* 70000\)"):
        TokenStore.open(folder, LargeTokenizer())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 4}, "format"),
        ({"dtype": "object"}, "dtype"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"files": {"../x": {"bytes": 1, "xxh3": ""}}}, "files"),
        ({"skipped": "3"}, "skipped"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_malformed_index_is_an_error_that_names_the_key(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    folder = written(tmp_path / "tokens")
    write_described(folder, {**read_described(folder), **change})
    with pytest.raises(DataError, match=f"tokens.json: {message}"):
        TokenStore.open(folder, ByteTokenizer())


def test_a_folder_without_tokens_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokens.json: No such file"):
        TokensSource(path=str(tmp_path)).open(ByteTokenizer(), tmp_path)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    folder = written(tmp_path / "tokens")
    os.truncate(folder / "tokens-00000.bin", 6)
    with pytest.raises(DataError, match=r"tokens-00000.bin: 6 bytes; tokens.json says 16 bytes"):
        TokenStore.open(folder, ByteTokenizer())


def test_the_folder_of_an_unknown_user_is_no_cache() -> None:
    with pytest.raises(RecipeError, match="no home folder for '~nosuch-user/x'"):
        cache_folder("~nosuch-user/x")
