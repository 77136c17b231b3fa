"""A Hugging Face folder that is damaged or made to do harm is refused, and nothing is loaded."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.engine.core.errors import CheckpointError
from trainer.engine.formats import hf_folder
from trainer.engine.formats.hf_load import load_huggingface

from .hf_folders import INDEX, SINGLE, config_of, empty_model, refusal, weights_of, write_shards


def header_of(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def to_single(content: bytes) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / INDEX).unlink()
        (folder / SINGLE).write_bytes(content)

    return change


def to_index(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / INDEX).write_bytes(content)


def point_to(file: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["lm_head.weight"] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def first_shard(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: change(folder / "model-00001-of-00002.safetensors")


def cut_by(count: int) -> Callable[[Path], Any]:
    return lambda path: os.truncate(path, path.stat().st_size - count)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def repeat_in_second_shard(folder: Path) -> None:
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"lm_head.weight": torch.zeros(320, 32)}, second)


def only_pickles(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "path out of the folder": (point_to("../x.safetensors"), "../x.safetensors is not the plain"),
    "absolute path": (point_to("/etc/hostname"), "/etc/hostname is not the plain name"),
    "the folder above": (point_to(".."), ".. is not the plain name"),
    "no name": (point_to(""), "'' is not the plain name"),
    "a name with escapes": (point_to("\x1b[2J.safetensors"), r"'\x1b[2J.safetensors' is not in"),
    "a null byte": (point_to("a\0.safetensors"), r"'a\x00.safetensors' is not in the folder"),
    "a number": (point_to(3), "weight_map must give a file name for every tensor"),
    "wrong file": (
        point_to("model-00002-of-00002.safetensors"),
        "lm_head.weight is not in model-00002-of-00002.safetensors, as the index says",
    ),
    "missing file": (first_shard(Path.unlink), "model-00001-of-00002.safetensors is not in the"),
    "a pipe": (first_shard(replace_by_fifo), "model-00001-of-00002.safetensors is not in the"),
    "a tensor in two files": (repeat_in_second_shard, "lm_head.weight is in model-00002-of-00002"),
    "truncated data": (first_shard(cut_by(4)), "model-00001-of-00002.safetensors cannot be read"),
    "truncated header": (
        first_shard(lambda path: os.truncate(path, 100)),
        "model-00001-of-00002.safetensors is damaged",
    ),
    "empty file": (first_shard(lambda path: os.truncate(path, 0)), "safetensors is damaged"),
    "index is no JSON": (to_index(b"weights"), "index.json is damaged: Expecting value"),
    "index is a list": (to_index(b"[]"), "index.json is damaged: a JSON object was expected"),
    "index is deep": (to_index(b'{"a":' * 100_000), "index.json is damaged"),
    "index without map": (to_index(b"{}"), "weight_map must give a file name"),
    "index gives twice": (
        to_index(b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "a is given twice",
    ),
    "header of 2^63": (to_single(header_of(b"{}", 2**63)), "a header of 9223372036854775808 bytes"),
    "header of 20 MB": (
        to_single(header_of(b'{"__metadata__":{"a":"' + b" " * 20_000_000 + b'"}}')),
        "a header of 20000025 bytes; at most 16777216 are read",
    ),
    "header gives twice": (
        to_single(header_of(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}") + bytes(4)),
        "model.safetensors is damaged: a is given twice",
    ),
    "tensors overlap": (
        to_single(header_of(b'{"a":' + ENTRY + b',"b":' + ENTRY + b"}") + bytes(4)),
        "model.safetensors cannot be read",
    ),
    "size overflows": (
        to_single(
            header_of(ENTRY.replace(b"[1]", b"[4294967296,4294967296]").join([b'{"a":', b"}"]))
        ),
        "model.safetensors cannot be read",
    ),
    "header is no JSON": (to_single(header_of(b"\x80\x04K\x01.")), "model.safetensors is damaged"),
    "only pickles": (only_pickles, "holds pickled weights (pytorch_model.bin)"),
    "no index": (without_index, "nor model.safetensors or model.safetensors.index.json; there is"),
    "config is no JSON": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"),
        "config.json is damaged",
    ),
    "config without end": (
        lambda folder: (folder / "config.json").write_bytes(b" " * (2**20 + 1)),
        "config.json has more than 1048576 bytes: not read",
    ),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_hostile_folder_is_refused(tmp_path: Path, case: str) -> None:
    change, message = HOSTILE[case]
    folder = write_shards(tmp_path / "source", weights_of(config_of()))
    change(folder)
    error = refusal(folder)
    assert message in error.message
    assert error.message.replace("\n", "").isprintable()
    if case == "only pickles":
        assert "safetensors" in error.hint


def test_an_index_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "MAX_INDEX_BYTES", 100)
    folder = write_shards(tmp_path / "source", weights_of(config_of()))
    assert "index.json has more than 100 bytes: not read" in refusal(folder).message


@pytest.mark.parametrize("name", ["nothing", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "cannot be read" in refusal(tmp_path / name).message


def test_random_damage_gives_no_other_error(tmp_path: Path) -> None:
    config = config_of(n_layers=1)
    folder = write_shards(tmp_path / "source", weights_of(config))
    (folder / "config.json").write_text(json.dumps(config.hf_config()))
    model, draw = empty_model(config), random.Random(4)
    refused = 0
    for path in sorted(folder.iterdir()):
        original = path.read_bytes()
        for _ in range(75):
            damaged = bytearray(original)
            for _ in range(draw.randint(1, 3)):
                damaged[draw.randrange(min(len(damaged), 1200))] = draw.randrange(256)
            path.write_bytes(damaged[: draw.choice([None, draw.randrange(len(damaged))])])
            with suppress(CheckpointError):
                refused += 1
                load_huggingface(folder, model, config)
                refused -= 1
        path.write_bytes(original)
    assert refused > 200
