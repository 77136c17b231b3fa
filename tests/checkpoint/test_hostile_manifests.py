"""A manifest made to do harm, with a checksum that is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from tests.limits import limited
from trainer.engine.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    read_manifest,
    write_manifest,
)
from trainer.engine.core.errors import CheckpointError

from .states import save_steps, seal

ENTRY = {"bytes": 1, "xxh3": "0"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m["files"].update({"../escape": ENTRY}), "not a plain file name"),
        (lambda m: m["files"].update({"/etc/passwd": ENTRY}), "not a plain file name"),
        (lambda m: m["files"].update({"..": ENTRY}), "not a plain file name"),
        (lambda m: m["files"].update({"a\nb": ENTRY}), "not a plain file name"),
        (lambda m: m.update(format=3), "format 3; this version reads formats 1 and 2"),
        (lambda m: m.pop("format"), "not understood"),
        (lambda m: m.pop("tensors"), "tensors: Field required"),
        (lambda m: m.update(step="three"), "step: Input should be a valid integer"),
        (lambda m: m.update(files=[1]), "files: Input should be a valid dictionary"),
        (lambda m: m.update(contents="pickle"), "contents: Input should be 'full' or 'weights'"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    save_steps(tmp_path, 1)
    seal(tmp_path / "step-00000001", change)
    with pytest.raises(CheckpointError, match=reason):
        read_manifest(tmp_path / "step-00000001")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'"manifest": 1}', b'"manifest": ' + b"[" * 100_000, b"\xff\xfe"]
)
def test_a_manifest_that_is_no_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(content).encode()
    (tmp_path / "manifest.json").write_bytes(b'{"xxh3": "%s",\n' % digest + content)
    with pytest.raises(CheckpointError, match="not understood"):
        read_manifest(tmp_path)


def sealed_manifest(folder: Path, extra: bytes) -> Path:
    """Write a manifest with a right checksum and so much in its `extra`."""
    said = b'"format": 1, "step": 1, "tensors": {}, "files": {}, "saved_at": ""'
    body = b'"manifest": {' + said + b', "extra": {"a": [' + extra + b"{}]}}}\n"
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    (folder / "manifest.json").write_bytes(b'{"xxh3": "%s",\n' % digest + body)
    return folder


def test_a_manifest_larger_than_any_run_needs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_manifest(sealed_manifest(tmp_path, b"{}," * 10_000)).step == 1
    monkeypatch.setattr("trainer.engine.checkpoint.manifest.MAX_MANIFEST_BYTES", 2**20)
    sealed_manifest(tmp_path, b"{}," * 2**19)
    with limited(), pytest.raises(CheckpointError, match="larger than 1 MiB"):
        read_manifest(tmp_path)


def test_the_largest_runs_manifest_is_far_below_the_limit(tmp_path: Path) -> None:
    """405 billion weights on 16,384 ranks, with the optimizer's state."""
    names = [
        f"optimizer.model.layers.{n // 9}.feed_forward.w{n % 9}.weight" for n in range(126 * 9)
    ]
    manifest = Manifest(
        step=1,
        saved_at="",
        tensors={
            f"{kind}.{name}": TensorEntry(shape=[16384, 53248], dtype="float32")
            for kind in ("model", "ema", "exp_avg", "exp_avg_sq")
            for name in names
        },
        files={
            f"shard-{rank:05d}.safetensors": FileEntry(bytes=10**9, xxh3="0" * 32)
            for rank in range(16384)
        },
    )
    write_manifest(tmp_path, manifest)
    assert (tmp_path / "manifest.json").stat().st_size < MAX_MANIFEST_BYTES / 8


@pytest.mark.matrix
def test_the_largest_manifest_that_is_read_takes_bounded_memory(tmp_path: Path) -> None:
    for one in (b"{},", b"[],", b'"",', b"1000,", b'{"a":1},', b"1.5,"):
        sealed_manifest(tmp_path, one * ((MAX_MANIFEST_BYTES - 1000) // len(one)))
        with limited(1700, cpu_seconds=60):
            assert read_manifest(tmp_path).step == 1
