"""A hostile checkpoint or Hugging Face folder: refused, with nothing run and nothing left."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.states import rewrite_as_format_1
from tests.conversion.models import hf_folder
from tests.conversion.run import Bomb, convert, refused
from tests.formats.hf_folders import config_of
from trainer.engine.checkpoint.manifest import hash_file, read_manifest, write_manifest
from trainer.engine.core.errors import CheckpointError
from trainer.engine.inference.open import open_model


def index_of(folder: Path, file: str) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = file
    index.write_text(json.dumps(content))


def header_of(folder: Path, length: int) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")


def config_with(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "path out of the folder": (lambda f: index_of(f, "../x.safetensors"), ["not the plain name"]),
    "absolute path": (lambda f: index_of(f, "/etc/hostname"), ["/etc/hostname is not the plain"]),
    "header of 2^62": (lambda f: header_of(f, 2**62), ["a header of 4611686018427387904 bytes"]),
    "NaN": (lambda f: config_with(f, rms_norm_eps=float("nan")), ["NaN is not a number"]),
    "huge number": (
        lambda f: (f / "config.json").write_text('{"hidden_size": ' + "9" * 6000 + "}"),
        ["config.json is damaged"],
    ),
    "huge sizes": (
        lambda f: config_with(f, hidden_size=2**30, num_hidden_layers=2**30),
        ["dim = 1073741824, but there are", "n_layers = 1073741824, but there are 21 tensors"],
    ),
    "more blocks than tensors": (
        lambda f: config_with(f, num_hidden_layers=21),
        ["n_layers = 21, but there are 21 tensors"],
    ),
    "wrong types": (
        lambda f: config_with(f, hidden_size="32", num_hidden_layers=None, rms_norm_eps=-1.0),
        ["config.json does not say num_hidden_layers"],
    ),
    "several impossible": (
        lambda f: config_with(f, hidden_size=-32, vocab_size=1.5, rms_norm_eps=-1.0),
        ["dim = -32", "vocab_size = 1.5", "norm_eps = -1.0"],
    ),
    "code of its own": (
        lambda f: config_with(f, model_type="mine", auto_map={"AutoModel": "m.py--M"}),
        ["no model of ours is of the type 'mine'", ", llama,"],
    ),
    "quantized": (
        lambda f: config_with(f, quantization_config={"bits": 4}),
        ['config.json says quantization_config = {"bits": 4}'],
    ),
    "a list": (lambda f: (f / "config.json").write_text("[]"), ["a JSON object was expected"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["has no config.json", "--recipe"]),
}


@pytest.mark.parametrize("way", ["hf2dcp", "hf2hf"])
@pytest.mark.parametrize("case", list(FOLDERS))
def test_a_hostile_folder_is_refused(
    tmp_path: Path, way: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, messages = FOLDERS[case]
    size = "20KB" if "path" in case else "1GB"
    source = hf_folder(tmp_path / "hf", config_of(), shard_size=size, tokenizer=False)
    change(source)
    said = refused(capsys, 5, way, source, tmp_path / "out")
    for message in messages:
        assert message in said


@pytest.mark.parametrize("text", [" " * 2**21 + "{}", "[[[", "[]"])
def test_a_hostile_generation_config_is_refused_before_weights_are_written(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hf_folder(tmp_path / "hf", tokenizer=False)
    file = source / "generation_config.json"
    file.write_text(text)
    assert f"error: {file} " in refused(capsys, 5, "hf2hf", source, tmp_path / "out")


def test_links_do_not_have_other_files_copied(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("my key")
    source = hf_folder(tmp_path / "model" / "snapshots" / "1", tokenizer=False)
    (source / "merges.txt").symlink_to(secret)
    (tmp_path / "model" / "blobs").mkdir()
    (tmp_path / "model" / "blobs" / "abc").write_text("{{ messages }}")
    (source / "chat_template.jinja").symlink_to("../../blobs/abc")
    for way in ("hf2hf", "hf2dcp"):
        words = [] if way == "hf2hf" else ["--verify"]
        assert convert(way, source, tmp_path / way, *words) == 0
        assert not (tmp_path / way / "merges.txt").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("native")
    assert convert("hf2dcp", hf_folder(root / "hf", tokenizer=False), root / "dcp") == 0
    return root / "dcp"


@pytest.fixture(scope="module")
def old_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in format 1."""
    folder = tmp_path_factory.mktemp("old") / "dcp"
    shutil.copytree(checkpoint, folder)
    rewrite_as_format_1(folder)
    return folder


def rewritten(checkpoint: Path, target: Path, change: Callable[[Path], Any]) -> Path:
    """Return a copy whose manifest agrees with the changed files, as an attacker would make it."""
    shutil.copytree(checkpoint, target)
    change(target)
    manifest = read_manifest(target)
    (target / "manifest.json").unlink()
    files = {
        name: {"bytes": (target / name).stat().st_size, "xxh3": hash_file(target / name)}
        for name in manifest.files
        if (target / name).exists()
    }
    write_manifest(target, replace(manifest, files=files))
    return target


def change_contents(change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def rewrite(folder: Path) -> None:
        file = folder / ".metadata"
        contents = pickle.loads(file.read_bytes())
        change(contents)
        file.write_bytes(pickle.dumps(contents))

    return rewrite


def redirect(contents: Any) -> None:
    for info in contents.storage_data.values():
        info.relative_path = "../../hf/model.safetensors"


def exchange(contents: Any) -> None:
    data = contents.storage_data
    one, other = (
        next(index for index in data if index.fqn == f"model.{name}.weight")
        for name in ("embed", "layers.0.mlp.up")
    )
    data[one], data[other] = data[other], data[one]


def beyond_the_end(contents: Any) -> None:
    for info in contents.storage_data.values():
        info.offset = 2**50


def overlap(contents: Any) -> None:
    name = "model.embed.weight"
    entry = contents.state_dict_metadata[name]
    entry.chunks = [entry.chunks[0], entry.chunks[0]]


def first_chunk(contents: Any) -> Any:
    return contents.state_dict_metadata["model.embed.weight"].chunks[0]


def no_chunks(contents: Any) -> None:
    contents.state_dict_metadata["model.embed.weight"].chunks = []


def forget(contents: Any) -> None:
    contents.storage_data.popitem()


NATIVE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file elsewhere": (change_contents(redirect), "points to '../../hf/model.safetensors'"),
    "tensors exchanged": (change_contents(exchange), "has the wrong shape"),
    "beyond the end": (change_contents(beyond_the_end), "is not read"),
    "parts that overlap": (change_contents(overlap), "do not make it up"),
    "no parts": (change_contents(no_chunks), "do not make it up"),
    "sizes that are none": (
        change_contents(lambda contents: setattr(first_chunk(contents), "sizes", None)),
        "cannot be read: TypeError",
    ),
    "a part without a place": (change_contents(forget), "does not say where"),
    "no contents": (lambda f: (f / ".metadata").write_bytes(b""), "cannot be read"),
    "data that is no archive": (
        lambda f: (f / "__0_0.distcp").write_bytes(b"\0" * 10**6),
        "is not read",
    ),
}


def change_part(change: Callable[[list[Any]], Any]) -> Callable[[Path], Any]:
    """Change the one part of the embedding in the index."""

    def rewrite(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index["chunks"]["model.embed.weight"][0])
        (folder / "index.json").write_text(json.dumps(index))

    return rewrite


INDEXES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "beyond the end": (change_part(lambda part: part.__setitem__(1, 2**50)), "outside of its file"),
    "half of it": (change_part(lambda part: part[3].__setitem__(0, 1)), "do not make it up"),
    "no index": (lambda folder: (folder / "index.json").write_bytes(b""), "cannot be read"),
}


@pytest.mark.parametrize("way", ["dcp2hf", "dcp2torch"])
@pytest.mark.parametrize("case", list(INDEXES))
def test_a_hostile_index_is_refused(
    checkpoint: Path, tmp_path: Path, way: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = INDEXES[case]
    source = rewritten(checkpoint, tmp_path / "dcp", change)
    assert message in refused(capsys, 5, way, source, tmp_path / "out")
    with pytest.raises(CheckpointError):
        open_model(source)


def test_a_checkpoint_of_format_1_is_converted(
    checkpoint: Path, old_checkpoint: Path, tmp_path: Path
) -> None:
    for source, name in ((checkpoint, "new.pt"), (old_checkpoint, "old.pt")):
        assert convert("dcp2torch", source, tmp_path / name, "--verify") == 0
    assert (tmp_path / "new.pt").read_bytes() == (tmp_path / "old.pt").read_bytes()


@pytest.mark.parametrize("way", ["dcp2hf", "dcp2torch"])
@pytest.mark.parametrize("case", list(NATIVE))
def test_a_hostile_checkpoint_of_format_1_is_refused(
    old_checkpoint: Path,
    tmp_path: Path,
    way: str,
    case: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, message = NATIVE[case]
    source = rewritten(old_checkpoint, tmp_path / "dcp", change)
    assert message in refused(capsys, 5, way, source, tmp_path / "out")
    with pytest.raises(CheckpointError):
        open_model(source)


def test_a_checkpoint_that_runs_code_is_refused(
    old_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    source = rewritten(
        old_checkpoint,
        tmp_path / "dcp",
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Bomb(canary))),
    )
    said = refused(capsys, 5, "dcp2hf", source, tmp_path / "out")
    assert "asks for posix.mkdir: refused" in said
    assert not canary.exists()


def test_a_changed_byte_is_found_while_tensors_are_copied(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(checkpoint, tmp_path / "dcp")
    file = tmp_path / "dcp" / "shard-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    said = refused(capsys, 5, "dcp2hf", tmp_path / "dcp", tmp_path / "out")
    assert "shard-00000.safetensors does not hold what was saved: its checksum differs" in said
