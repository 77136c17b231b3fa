"""A hostile file of torch.save: refused, with nothing run and nothing left."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.meta_reference import PARAMS, weights
from tests.conversion.meta_reference import write as write_meta
from tests.conversion.run import Bomb, refused
from tests.limits import limited
from trainer.engine.checkpoint.torch_file import MAX_PICKLE_BYTES, read_file_tensors
from trainer.engine.core.errors import CheckpointError


@pytest.mark.parametrize("way", ["torch2dcp", "meta2dcp"])
def test_a_pickle_that_runs_code_is_refused(
    tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    content = {"w": torch.zeros(2), "bomb": Bomb(canary)}
    if way == "torch2dcp":
        torch.save(content, source := tmp_path / "model.pt")
    else:
        source = write_meta(tmp_path / "meta", weights(PARAMS), PARAMS)
        torch.save(content, source / "consolidated.00.pth")
    assert "is not read" in refused(capsys, 5, way, source, tmp_path / "out" / "dcp")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert canary.exists(), "the bomb is real"


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_bare_pickle_is_refused(
    tmp_path: Path, protocol: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source, canary = tmp_path / "model.pt", tmp_path / "canary"
    source.write_bytes(pickle.dumps(Bomb(canary), protocol))
    assert "is not read" in refused(capsys, 5, "torch2dcp", source, tmp_path / "dcp")
    assert not canary.exists()


def repack(file: Path, change: Callable[[str, bytes], bytes], method: int = 0) -> None:
    """Write an archive anew with changed records."""
    with zipfile.ZipFile(file) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, change(name, content))


def cut_data(name: str, content: bytes) -> bytes:
    return content[:-4] if name.endswith("data/0") else content


def many_zeros(name: str, content: bytes) -> bytes:
    return b"(" * 2**27 if name.endswith("data.pkl") else content


def big_endian(name: str, content: bytes) -> bytes:
    return b"big" if name.endswith("byteorder") else content


def larger_shape(name: str, content: bytes) -> bytes:
    if not name.endswith("data.pkl"):
        return content
    assert content.count(b"K\x05K\x07\x86") == 1
    return content.replace(b"K\x05K\x07\x86", b"K\x05K\x7f\x86")


def many_objects(name: str, content: bytes) -> bytes:
    return b"\x80\x02" + b"}" * 2**20 + b"." if name.endswith("data.pkl") else content


def shared_dictionaries(file: Path) -> None:
    """5 kB that are 40**7 entries when each is written out where it is used."""
    content: dict[str, Any] = {"w": torch.zeros(2)}
    for _ in range(7):
        content = {f"k{number}": content for number in range(40)}
    torch.save(content, file)


ARCHIVES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "record shorter than its tensor": (lambda f: repack(f, cut_data), "has more elements than"),
    "shape larger than its record": (lambda f: repack(f, larger_shape), "is not"),
    "compressed records": (
        lambda f: repack(f, lambda _, content: content, zipfile.ZIP_DEFLATED),
        "is compressed: not read",
    ),
    "a pickle that unpacks to 128 MB": (
        lambda f: repack(f, many_zeros, zipfile.ZIP_DEFLATED),
        "is compressed: not read",
    ),
    "a pickle of 128 MB": (lambda f: repack(f, many_zeros), "a record of 134217728 bytes"),
    "a pickle of a million dictionaries": (
        lambda f: repack(f, many_objects),
        "at most 262256 are made",
    ),
    "dictionaries that share others": (shared_dictionaries, "no dictionary of tensors"),
    "other byte order": (lambda f: repack(f, big_endian), "big-endian: not read"),
    "cut off": (lambda f: os.truncate(f, f.stat().st_size - 10), "is not read"),
    "empty": (lambda f: os.truncate(f, 0), "is not read"),
    "no archive": (lambda f: f.write_bytes(b"\0" * 1000), "is not read"),
    "no dictionary": (lambda f: torch.save(torch.zeros(5, 7), f), "no dictionary of tensors"),
    "only numbers": (lambda f: torch.save({"a": 1}, f), "no dictionary of tensors"),
    "a view with gaps": (
        lambda f: torch.save({"a": torch.zeros(5, 14)[:, ::2]}, f),
        "not plain and contiguous",
    ),
    "an endless tensor of one number": (
        lambda f: torch.save({"a": torch.zeros(1).expand(2**40)}, f),
        "not plain and contiguous",
    ),
}


@pytest.mark.parametrize("case", list(ARCHIVES))
def test_a_hostile_state_dict_is_refused(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = ARCHIVES[case]
    source = tmp_path / "model.pt"
    torch.save({"a": torch.arange(35.0).view(5, 7)}, source)
    change(source)
    with limited():
        said = refused(capsys, 5, "torch2dcp", source, tmp_path / "dcp")
    assert message in said
    assert str(source) in said


@pytest.mark.matrix
def test_a_state_dict_of_many_tensors_is_read(tmp_path: Path) -> None:
    state = {f"model.layers.{n}.LayerNoRm.weight": torch.zeros(1) for n in range(20_000)}
    torch.save(state, tmp_path / "model.pt")
    assert read_file_tensors(tmp_path / "model.pt").keys() == state.keys()


@pytest.mark.matrix
@pytest.mark.parametrize("filling", [b"Nr\0\0\0\1", b"Nq\0h\0\x85", b"J\0\0\1\1", b"N", b"]a"])
def test_the_largest_pickle_that_is_read_takes_bounded_memory(
    tmp_path: Path, filling: bytes
) -> None:
    def fill(name: str, content: bytes) -> bytes:
        pickled = filling * ((MAX_PICKLE_BYTES - 3) // len(filling))
        return b"\x80\x02" + pickled + b"." if name.endswith("data.pkl") else content

    torch.save({"a": torch.zeros(1)}, tmp_path / "model.pt")
    repack(tmp_path / "model.pt", fill)
    with limited(1700, cpu_seconds=60), suppress(CheckpointError):
        read_file_tensors(tmp_path / "model.pt")


def test_random_damage_gives_no_other_error(tmp_path: Path) -> None:
    source, draw, refusals = tmp_path / "model.pt", random.Random(3), 0
    torch.save({"a": torch.arange(35.0).view(5, 7), "b": torch.zeros(3)}, source)
    original = source.read_bytes()
    for _ in range(300):
        damaged = bytearray(original)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        source.write_bytes(damaged[: draw.choice([None, draw.randrange(len(damaged))])])
        with suppress(CheckpointError):
            refusals += 1
            read_file_tensors(source)
            refusals -= 1
    assert refusals > 100
