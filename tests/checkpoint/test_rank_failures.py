"""Failures of one rank, which all ranks learn of."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.checkpoint.store import CheckpointStore
from trainer.engine.core.errors import CheckpointError, EnvironmentFault

from ..distributed import run_ranks, run_ranks_to_their_ends
from .states import blank, differing, open_store, save_steps, state_of
from .test_ranks import group, placed

KILLS = [
    ("before_copy", 1, "async"),
    ("before_write", 0, "sync"),
    ("before_write", 1, "async"),
    ("after_write", 0, "async"),
    ("after_write", 1, "sync"),
    ("before_manifest", 0, "async"),
    ("after_manifest", 0, "sync"),
    ("before_rename", 0, "async"),
    ("after_rename", 0, "sync"),
    ("after_rename", 0, "async"),
]


def save_two(folder: Path, mode: str) -> None:
    store = CheckpointStore(folder, mode=mode, keep=2, group=group())
    store.probe()
    for step in (1, 2):
        store.save(placed(state_of(step), "sharded"), SaveInfo(step=step))
        store.wait_staged()
        store.finish()


@pytest.mark.parametrize(("point", "rank", "mode"), KILLS)
def test_a_rank_killed_during_a_save_publishes_nothing(
    tmp_path: Path, point: str, rank: int, mode: str
) -> None:
    fault = {"TRAINER_FAULT": f"checkpoint.{point}:rank{rank}:step2:kill"}
    start = time.monotonic()
    outcomes = run_ranks_to_their_ends(2, save_two, tmp_path, mode, env=fault, timeout=60)
    assert time.monotonic() - start < 50, "the survivor waits too long"
    assert "SIGKILL" in outcomes[rank].error
    assert "LostContact" in outcomes[1 - rank].error
    assert "lost contact with another rank" in outcomes[1 - rank].error
    published = 2 if point == "after_rename" else 1
    store = open_store(tmp_path)
    found = store.latest()
    assert found is not None
    assert found.manifest.step == published
    assert found.skipped == []
    assert {path.name[:5] for path in tmp_path.iterdir()} == {"step-"}


def save_despite(folder: Path, mode: str) -> tuple[str, list[str], int]:
    store = CheckpointStore(folder, mode=mode, keep=2, group=group())
    store.probe()
    message = ""
    for step in (1, 2, 3):
        try:
            state = placed(state_of(step), "sharded")
            store.save(state, SaveInfo(step=step), sync=step == 3)
            store.wait_staged()
            store.finish()
        except CheckpointError as error:
            message = error.message
    found = store.latest()
    assert found is not None
    return message, sorted(path.name for path in folder.iterdir()), found.manifest.step


@pytest.mark.parametrize(
    ("fault", "mode", "reason"),
    [
        ("before_copy:rank1:step2:raise", "async", "rank 1: RuntimeError: fault"),
        ("before_write:rank1:step2:full", "sync", "rank 1: no space for a checkpoint"),
        ("before_write:rank0:step2:full", "async", "rank 0: no space for a checkpoint"),
        ("before_manifest:rank0:step2:full", "async", "no space for a checkpoint"),
        ("before_rename:rank0:step2:raise", "sync", "fault"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_the_run_goes_on(
    tmp_path: Path, fault: str, mode: str, reason: str
) -> None:
    env = {"TRAINER_FAULT": f"checkpoint.{fault}"}
    for message, names, newest in run_ranks(2, save_despite, tmp_path, mode, env=env):
        assert reason in message
        assert names == ["step-00000001", "step-00000003"]
        assert newest == 3
    assert differing(find_checkpoint(tmp_path), 3) == []


def save_with_little_patience(folder: Path) -> None:
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    store = CheckpointStore(folder, mode="async", keep=2, group=impatient)
    store.probe()
    store.save(placed(state_of(1), "sharded"), SaveInfo(step=1))
    store.finish()


def test_a_rank_that_hangs_ends_the_save_at_the_groups_time_limit(tmp_path: Path) -> None:
    fault = {"TRAINER_FAULT": "checkpoint.before_write:rank1:stop"}
    outcomes = run_ranks_to_their_ends(
        2, save_with_little_patience, tmp_path, env=fault, timeout=60, grace=0
    )
    assert "LostContact" in outcomes[0].error
    assert list(tmp_path.iterdir()) == []


def find_damaged(folder: Path) -> tuple[str, list[str]]:
    store = CheckpointStore(folder, mode="sync", keep=2, group=group())
    found = store.latest()
    assert found is not None
    return found.path.name, found.skipped


def test_all_ranks_agree_on_what_to_skip(tmp_path: Path) -> None:
    run_ranks(2, save_two, tmp_path, "sync")
    file = tmp_path / "step-00000002" / "shard-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for name, skipped in run_ranks(2, find_damaged, tmp_path):
        assert name == "step-00000001"
        assert len(skipped) == 1
        assert "step-00000002: shard-00001.safetensors does not hold what was saved" in skipped[0]


def find_none_intact(folder: Path) -> str:
    store = CheckpointStore(folder, mode="sync", keep=2, group=group())
    with pytest.raises(CheckpointError) as raised:
        store.latest()
    return raised.value.message


def test_none_intact_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "step-00000001" / "shard-00000.safetensors").unlink()
    for message in run_ranks(2, find_none_intact, tmp_path):
        assert "shard-00000.safetensors is missing" in message


def load_with_a_misfit_on_rank_1(folder: Path) -> tuple[str, float]:
    found = find_checkpoint(folder)
    state = placed(blank(), "sharded")
    if dist.get_rank() == 1:
        state["model.unknown"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as raised:
        load_state(found.path, found.manifest, state, group())
    return raised.value.message, state["optimizer.embedding.step"].item()


def test_a_misfit_on_one_rank_stops_all_before_any_tensor_is_touched(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    for message, value in run_ranks(2, load_with_a_misfit_on_rank_1, tmp_path):
        assert "rank 1: " in message
        assert "model.unknown is not in the checkpoint" in message
        assert value == -1


def probe_where_it_cannot_be(folder: Path) -> str:
    store = CheckpointStore(folder / "file" / "checkpoints", mode="sync", keep=2, group=group())
    with pytest.raises(EnvironmentFault) as raised:
        store.probe()
    return raised.value.message


def test_a_folder_that_cannot_be_written_is_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for message in run_ranks(2, probe_where_it_cannot_be, tmp_path):
        assert "cannot write checkpoints to" in message


def save_where_rank_1_sees_another_folder(folder: Path) -> str:
    own = folder / f"machine-{dist.get_rank()}"
    own.mkdir()
    store = CheckpointStore(own, mode="sync", keep=2, group=group())
    with pytest.raises(CheckpointError) as raised:
        store.save(placed(state_of(1), "sharded"), SaveInfo(step=1))
    return raised.value.render()


def test_ranks_that_share_no_folder_are_told_so(tmp_path: Path) -> None:
    for message in run_ranks(2, save_where_rank_1_sees_another_folder, tmp_path):
        assert "file system that all ranks share" in message
