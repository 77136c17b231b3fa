"""Links and undeletable files in the checkpoints folder: left, said once, never in the way."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from trainer.engine.checkpoint import retention
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.store import CheckpointStore
from trainer.engine.core.errors import ExitCode

from .states import differing, open_store, save_steps, state_of
from .test_cli import call, parsed


def move_and_link(checkpoint: Path, to: Path) -> Path:
    """Move a checkpoint to another folder, and put a link in its place."""
    to.mkdir(exist_ok=True)
    moved = checkpoint.rename(to / checkpoint.name)
    checkpoint.symlink_to(moved)
    return moved


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_linked_checkpoint_is_left_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, disk = tmp_path / "checkpoints", tmp_path / "disk"
    save_steps(folder, 1)
    moved = move_and_link(folder / "step-00000001", disk)
    store = open_store(folder, keep=1)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3, 4):
            store.save(state_of(step), SaveInfo(step=step))
    assert names(folder) == ["step-00000001", "step-00000004"]
    assert (moved / "manifest.json").exists()
    assert [text.count("it is a link") for text in caplog.messages] == [1]


def test_a_linked_checkpoint_is_read_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save_steps(folder, 1, 2)
    move_and_link(folder / "step-00000002", tmp_path / "disk")
    found = open_store(folder).latest()
    assert found is not None
    assert (found.manifest.step, differing(found, 2)) == (2, [])
    assert [row["problems"] for row in parsed("list", tmp_path)] == [[], []]
    assert call("verify", tmp_path).exit_code == 0


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_save_of_a_linked_step_replaces_the_link_alone(tmp_path: Path, is_dangling: bool) -> None:
    folder = tmp_path / "checkpoints"
    save_steps(folder, 1, 2)
    moved = move_and_link(folder / "step-00000002", tmp_path / "disk")
    if is_dangling:
        moved = moved.rename(tmp_path / "disk" / "elsewhere")
    store = open_store(folder)
    store.save(state_of(2), SaveInfo(step=2))
    assert not (folder / "step-00000002").is_symlink()
    assert (moved / "manifest.json").exists()
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_leftovers_that_cannot_be_deleted_stop_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / ".tmp-step-00000002-00000000").write_text("a file")
    (tmp_path / ".del-step-00000003-00000000").symlink_to(tmp_path)
    busy = tmp_path / ".tmp-step-00000004-00000000"
    busy.mkdir()
    (busy / "shard-00000.safetensors").write_text("space")
    (busy / ".nfs0001").write_text("still open")
    remove = os.unlink

    def unlink(path: str, **options: int) -> None:
        if str(path).endswith(".nfs0001"):
            raise OSError(16, "Device or resource busy")
        remove(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    with caplog.at_level(logging.WARNING):
        store = open_store(tmp_path)
        store.save(state_of(5), SaveInfo(step=5))
        open_store(tmp_path)
    assert sum("is left: it is not a folder" in text for text in caplog.messages) == 1
    assert sum("it is a link" in text for text in caplog.messages) == 1
    assert sum("Device or resource busy" in text for text in caplog.messages) == 1
    assert names(busy) == [".nfs0001"]
    found = store.latest()
    assert found is not None
    assert found.manifest.step == 5


def test_an_old_checkpoint_of_another_owner_is_left_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "step-00000001" not in str(path) and access(path, mode)
    )
    store = open_store(tmp_path, keep=1)
    with caplog.at_level(logging.WARNING):
        store.save(state_of(3), SaveInfo(step=3))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert sum("this user may not delete" in text for text in caplog.messages) == 1


def test_prune_says_what_it_left_and_why(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save_steps(folder, 1, 2, 3)
    move_and_link(folder / "step-00000001", tmp_path / "disk")
    result = call("prune", tmp_path, "--keep", 1)
    assert result.exit_code == 0
    assert "step-00000001 is left: it is a link" in result.output
    assert names(folder) == ["step-00000001", "step-00000003"]
    (folder / ".tmp-step-00000009-00000000").write_text("a file")
    result = call("prune", tmp_path, "--keep", 1, "--json")
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert [text.split(": ", 1)[1] for text in json.loads(result.stdout)["left"]] == [
        "it is a link",
        "it is not a folder",
    ]


def test_a_last_save_that_was_killed_is_completed(tmp_path: Path) -> None:
    """Put back what a kill between the rename of step 3 and its aliases leaves."""
    save_steps(tmp_path, 1, 2, 3)
    for name in (retention.BEST, retention.LATEST):
        retention.set_alias(tmp_path, name, 2)
        (tmp_path / f".{name}").symlink_to("step-00000003")
    store = CheckpointStore(tmp_path, mode="sync", keep=1, group=None, names_latest=True)
    store.probe()
    assert os.readlink(tmp_path / "latest") == "step-00000003"
    found = store.latest()
    assert found is not None
    store.complete(found.path, 3)
    assert names(tmp_path) == ["best", "latest", "step-00000003"]
    assert os.readlink(tmp_path / "best") == "step-00000003"


def test_a_damaged_newest_checkpoint_does_not_prune_the_intact_one(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (shard,) = (tmp_path / "step-00000002").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    store = open_store(tmp_path, keep=1)
    found = store.latest()
    assert found is not None
    store.complete(found.path, 1)
    assert found.manifest.step == 1
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_folder_that_cannot_be_read_is_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)

    def listdir(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", listdir)
    result = call("list", tmp_path)
    assert getattr(result.exception, "exit_code", None) == ExitCode.CHECKPOINT
    assert retention.read_best_alias(tmp_path) is None


def test_prune_deletes_what_a_killed_export_left(tmp_path: Path) -> None:
    save_steps(tmp_path / "checkpoints", 1)
    (tmp_path / ".lock").touch()
    (tmp_path / ".tmp-hf-0123abcd" / "hf").mkdir(parents=True)
    parsed("prune", tmp_path, "--keep", 1, "--dry-run")
    assert (tmp_path / ".tmp-hf-0123abcd").exists()
    parsed("prune", tmp_path, "--keep", 1)
    assert names(tmp_path) == [".lock", "checkpoints"]
