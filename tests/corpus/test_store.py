"""Token stores: shards read as one array, and folders that are not what they say."""

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpus.stores import read_described, write_described
from trainer.engine.core.errors import DataError
from trainer.engine.corpus.manifest import (
    PAGE_TOKENS,
    CorpusManifest,
    find_damaged_files,
    read_manifest,
)
from trainer.engine.corpus.store import StoreWriter, TokenStore
from trainer.engine.corpus.tokenise import make_chunk
from trainer.engine.data.packing import PACKINGS
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

SHARDS = 4


def written(folder: Path, shard_tokens: int = 2**28, marked: bool = False) -> Path:
    """Documents of random bytes: more than three times `PAGE_TOKENS`, borders anywhere."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, 256, length) for length in random.integers(1, 3000, 150)]
    with StoreWriter(folder, ByteTokenizer(), shard_tokens) as writer:
        for first in range(0, 150, 10):
            some = documents[first : first + 10]
            learned = [random.random(len(ids) + 1) < 0.5 for ids in some]
            marks = learned if marked and first >= 50 else None
            writer.write(make_chunk(ByteTokenizer(), some, marks))
        writer.finish()
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the same corpus in one file, and in four."""
    folder = tmp_path_factory.mktemp("stores")
    return (
        written(folder / "one", marked=True),
        written(folder / "several", PAGE_TOKENS, marked=True),
    )


def test_shards_are_one_array_in_every_way_of_reading(pair: tuple[Path, Path]) -> None:
    one, several = (TokenStore.open(folder, ByteTokenizer()) for folder in pair)
    assert len(list(pair[1].glob("tokens-*.bin"))) == len(list(pair[1].glob("learned-*"))) == SHARDS
    assert one.num_tokens > 3 * PAGE_TOKENS
    assert one.fingerprint == several.fingerprint
    assert np.array_equal(one.offsets, several.offsets)
    border = 2 * PAGE_TOKENS
    for mine, theirs in ((several.tokens, one.tokens), (several.loss_mask, one.loss_mask)):
        assert mine is not None
        assert theirs is not None
        assert mine.dtype == theirs.dtype
        assert mine.flags.c_contiguous
        assert not mine.flags.writeable
        assert np.array_equal(mine, theirs)
        assert mine[border - 3 : border + 3].tolist() == theirs[border - 3 : border + 3].tolist()
        index = np.random.default_rng(1).integers(0, one.num_tokens, 10_000)
        assert np.array_equal(mine.take(index), theirs.take(index))
        assert np.array_equal(mine[::4096], theirs[::4096])
        windows = [
            np.lib.stride_tricks.as_strided(
                array, (1000, 300), (150 * array.itemsize, array.itemsize), writeable=False
            )
            for array in (mine, theirs)
        ]
        assert np.array_equal(*windows)


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_do_not_depend_on_the_shards(pair: tuple[Path, Path], packing: str) -> None:
    gathered = []
    for folder in pair:
        store = TokenStore.open(folder, ByteTokenizer())
        packed = PACKINGS[packing](store, 0, store.num_tokens, 333)
        gathered.append(packed.gather(np.arange(packed.num_rows)))
    assert np.array_equal(gathered[0].tokens, gathered[1].tokens)
    assert np.array_equal(gathered[0].labels, gathered[1].labels)


def test_documents_before_the_first_marked_one_are_learned_whole(pair: tuple[Path, Path]) -> None:
    store = TokenStore.open(pair[0], ByteTokenizer())
    assert store.loss_mask is not None
    border = store.offsets[50]
    assert store.loss_mask[:border].all()
    assert 0.45 < store.loss_mask[border:].mean() < 0.55


def test_a_view_keeps_the_mapping_alive_and_the_last_one_frees_it(tmp_path: Path) -> None:
    store = TokenStore.open(written(tmp_path / "tokens", PAGE_TOKENS), ByteTokenizer())
    region = weakref.ref(store.tokens.base)
    view, expected = store.tokens[-5:], store.tokens[-5:].tolist()
    del store
    gc.collect()
    assert view.tolist() == expected
    del view
    gc.collect()
    assert region() is None


def test_the_files_are_what_their_names_and_the_manifest_say(tmp_path: Path) -> None:
    folder = written(tmp_path / "tokens", PAGE_TOKENS)
    manifest = read_manifest(folder)
    shards = [np.fromfile(folder / name, dtype="<u2") for name in manifest.shards("tokens")]
    assert [len(shard) for shard in shards[:-1]] == [PAGE_TOKENS] * (SHARDS - 1)
    assert sum(map(len, shards)) == manifest.num_tokens
    assert (np.concatenate(shards) == 256).sum() == manifest.num_documents == 150
    assert list(find_damaged_files(folder, manifest)) == []


@pytest.mark.parametrize("name", ["tokens-00000.bin", "tokens-00003.bin", "offsets.npy"])
def test_a_flipped_bit_in_any_file_is_found(tmp_path: Path, name: str) -> None:
    folder = written(tmp_path / "tokens", PAGE_TOKENS)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 4
    (folder / name).write_bytes(content)
    assert list(find_damaged_files(folder, read_manifest(folder))) == [name]


def test_folders_of_the_first_format_still_open(tmp_path: Path) -> None:
    folder = written(tmp_path / "tokens")
    manifest = read_described(folder)
    kept = ("dtype", "num_tokens", "num_documents", "tokenizer", "vocab_size", "eos_id", "files")
    first = {key: manifest[key] for key in kept}
    first |= {"format": 1, "skipped": 3, "faults": ["a.jsonl:3: not JSON"]}
    (folder / "tokens.json").write_text(json.dumps(first))
    store = TokenStore.open(folder, ByteTokenizer())
    assert store.fingerprint == manifest["fingerprint"]
    assert store.num_documents == 150
    assert store.skipped == 3
    assert store.faults == ["a.jsonl:3: not JSON"]


def _renamed(files: dict[str, Any], name: str) -> dict[str, Any]:
    return {name if old == "tokens-00001.bin" else old: entry for old, entry in files.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda said: {"files": _renamed(said["files"], "../tokens-00001.bin")},
        lambda said: {"files": _renamed(said["files"], "/etc/passwd")},
        lambda said: {"files": _renamed(said["files"], "tokens-00009.bin")},
        lambda said: {"files": {**said["files"], "more.bin": {"bytes": 1, "xxh3": ""}}},
        lambda said: {"num_tokens": said["num_tokens"] + 1},
        lambda said: {"num_tokens": 2**53},
        lambda said: {"num_tokens": 2**80},
        lambda said: {"num_documents": said["num_documents"] + 1},
        lambda said: {"num_documents": 2**53},
        lambda said: {"shard_tokens": PAGE_TOKENS * 2},
        lambda said: {"shard_tokens": 1},
        lambda said: {"shard_tokens": 0},
        lambda said: {"dtype": "uint32"},
        lambda said: {"learned": True},
        lambda said: {"eos_id": -1},
        lambda said: {"faults": ["x"] * 1000},
        lambda said: {"sources": "none"},
        lambda said: {"others": {"../passwd": said["files"]["offsets.npy"]}},
        lambda said: {"others": {"tokenizer/a/b": said["files"]["offsets.npy"]}},
        lambda said: {"others": {"offsets.npy": said["files"]["offsets.npy"]}},
    ],
)
def test_a_manifest_that_does_not_fit_its_files_is_refused(tmp_path: Path, change: Any) -> None:
    folder = written(tmp_path / "tokens", PAGE_TOKENS)
    said = read_described(folder)
    write_described(folder, said | change(said))
    with pytest.raises(DataError) as error:
        TokenStore.open(folder, ByteTokenizer())
    assert str(folder) in error.value.message


def test_a_manifest_of_many_megabytes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.engine.corpus.manifest.MAX_MANIFEST_BYTES", 2**20)
    folder = written(tmp_path / "tokens")
    (folder / "tokens.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(DataError, match="larger than 1 MiB"):
        TokenStore.open(folder, ByteTokenizer())


@pytest.mark.parametrize("damage", ["pickle", "short", "text", "empty"])
def test_offsets_that_are_none_are_refused(tmp_path: Path, damage: str) -> None:
    folder = written(tmp_path / "tokens")
    file = folder / "offsets.npy"
    size = file.stat().st_size
    if damage == "pickle":
        np.save(file, np.array([os.getcwd] * 3, dtype=object), allow_pickle=True)
    elif damage == "short":
        np.save(file, np.load(file, allow_pickle=False)[:-1])
    else:
        file.write_bytes(b"x" * 80 if damage == "text" else b"")
    content = file.read_bytes()[:size].ljust(size, b"\0")
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"offsets.npy: not the offsets of 150 documents"):
        TokenStore.open(folder, ByteTokenizer())


def test_shards_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    shards = 100_002
    described = read_described(written(tmp_path / "tokens"))
    names = [f"tokens-{number:05d}.bin" for number in range(shards)]
    offsets = described["files"]["offsets.npy"]
    files = {name: {"bytes": 2 * PAGE_TOKENS, "xxh3": ""} for name in names}
    described |= {"num_tokens": shards * PAGE_TOKENS, "shard_tokens": PAGE_TOKENS}
    manifest = CorpusManifest.model_validate(
        {**described, "files": {**files, "offsets.npy": offsets}}
    )
    assert manifest.shards("tokens") == names
