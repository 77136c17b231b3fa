"""Saving, finding and loading in one process."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from trainer.engine.checkpoint import retention
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import SaveInfo, read_manifest, verify
from trainer.engine.checkpoint.reader import load_state, load_weights
from trainer.engine.checkpoint.tables import Allocate, CheckpointMode, checkpoint_modes
from trainer.engine.core.errors import CheckpointError, EnvironmentFault, ExitCode

from ..distributed import run_ranks
from .states import blank, differing, open_store, save_steps, state_of


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoint_comes_back_with_its_values_and_words(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    info = SaveInfo(step=3, samples=24, recipe={"run": {"seed": 1}}, extra={"best": 1.5})
    store.save(state_of(3), info)
    found = store.latest()
    assert found is not None
    assert found.path == tmp_path / "step-00000003"
    assert differing(found, 3) == []
    assert (found.manifest.samples, found.manifest.recipe, found.manifest.extra) == (
        24,
        {"run": {"seed": 1}},
        {"best": 1.5},
    )
    assert found.manifest.tensors["model.half"] == {"shape": [4, 4], "dtype": "bfloat16"}
    assert found.skipped == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_itself_can_load_it(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    save_steps(tmp_path, 1)
    loaded = blank()
    reader = HuggingFaceStorageReader(str(tmp_path / "step-00000001"))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_of(1).items())


def test_no_checkpoint_is_none_and_not_an_error(tmp_path: Path) -> None:
    assert open_store(tmp_path / "run" / "checkpoints").latest() is None


def test_a_mode_of_a_plugin_allocates_the_copies(tmp_path: Path) -> None:
    allocated = []

    def allocate(source: Tensor) -> Tensor:
        allocated.append(torch.empty(source.shape, dtype=source.dtype))
        return allocated[-1]

    class Own(CheckpointMode):
        name: Literal["own"] = "own"

        def build(self) -> Allocate:
            return allocate

    with patch.dict(checkpoint_modes._places), patch.dict(checkpoint_modes._configs):
        checkpoint_modes.register(Own)
        store = open_store(tmp_path, "own")
    for step in (1, 2):
        store.save(state_of(step), SaveInfo(step=step))
        store.wait_staged()
    store.finish()
    assert len(allocated) == len(state_of(1)), "the second save uses the memory of the first"
    assert differing(find_checkpoint(tmp_path), 2) == []


@pytest.mark.parametrize("mode", ["sync", "async", "async_pinned"])
def test_saved_values_are_those_of_the_moment_of_the_save(tmp_path: Path, mode: str) -> None:
    store = open_store(tmp_path, mode, keep=9)
    state = {"model.weight": torch.zeros(500, 1000)}
    for step in range(1, 5):
        store.save(state, SaveInfo(step=step))
        store.wait_staged()
        state["model.weight"] += 1  # the optimizer's step
    store.finish()
    for step in range(1, 5):
        found = find_checkpoint(tmp_path / f"step-{step:08d}")
        loaded = {"model.weight": torch.empty(500, 1000)}
        load_state(found.path, found.manifest, loaded, None)
        assert loaded["model.weight"].unique().tolist() == [step - 1]


def test_a_state_of_another_shape_can_follow(tmp_path: Path) -> None:
    store = open_store(tmp_path, "async")
    store.save(state_of(1), SaveInfo(step=1))
    store.wait_staged()
    weights = {"model.embedding": torch.full((2, 2), 7.0)}
    store.save(weights, SaveInfo(step=2, contents="weights"), sync=True)
    found = store.latest()
    assert found is not None
    assert list(found.manifest.tensors) == ["model.embedding"]
    loaded = {"model.embedding": torch.zeros(2, 2)}
    load_state(found.path, found.manifest, loaded, None)
    assert torch.equal(loaded["model.embedding"], weights["model.embedding"])


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 100_000_000, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-100000000"]


def test_retention_does_not_count_a_broken_one(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003" / "shard-00000.safetensors").unlink()
    store = open_store(tmp_path, keep=2)
    store.save(state_of(4), SaveInfo(step=4))
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_retention_deletes_nothing_while_none_is_good(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / "manifest.json").unlink()
    assert retention.list_prunable(tmp_path, keep=1) == []


def test_what_lies_beyond_the_step_saved_is_set_aside(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 1, 2, 3)
    store.save(state_of(20), SaveInfo(step=2))  # resumed from step 1
    found = store.latest()
    assert found is not None
    assert found.manifest.step == 2
    assert differing(found, 20) == []
    assert [path.name[:23] for path in retention.list_abandoned(tmp_path)] == [
        "abandoned-step-00000003"
    ]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_start_finishes_what_a_kill_left(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000001").rename(tmp_path / ".del-step-00000001-0123abcd")
    (tmp_path / "step-00000002").rename(tmp_path / ".old-step-00000002-0123abcd")
    (tmp_path / ".tmp-step-00000003-0123abcd").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    open_store(tmp_path)
    assert names(tmp_path) == ["notes.txt", "step-00000002"]


def test_a_folder_that_cannot_be_made_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write checkpoints") as raised:
        open_store(tmp_path / "file" / "checkpoints")
    assert raised.value.exit_code == ExitCode.ENVIRONMENT


def test_too_little_space_for_another_checkpoint_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 1)
    monkeypatch.setattr("trainer.engine.checkpoint.store.free_bytes", lambda folder: 100)
    with pytest.raises(EnvironmentFault, match=r"the last one has [\d,]+ bytes, 100 are free"):
        open_store(tmp_path)


def fill_a_small_disk(folder: Path, mode: str) -> tuple[str, list[str]]:
    store = open_store(folder, mode)
    store.save(state_of(1), SaveInfo(step=1), sync=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    large = {"model.weight": torch.zeros(1000, 1000)}
    try:
        store.save(large, SaveInfo(step=2))
        store.wait_staged()
        store.finish()
    except CheckpointError as error:
        store.save(state_of(3), SaveInfo(step=3), sync=True)
        return error.render(), names(folder)
    return "no error", []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_is_told_with_numbers_and_the_run_can_go_on(tmp_path: Path, mode: str) -> None:
    [(message, left)] = run_ranks(1, fill_a_small_disk, tmp_path, mode)
    assert "4,000,000 bytes needed" in message
    assert left == ["step-00000001", "step-00000003"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_fails_the_save_only(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 1)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            store.save(state_of(2), SaveInfo(step=2))
    finally:
        tmp_path.chmod(0o700)
    assert store.latest() is not None


def test_a_failure_in_the_background_is_raised_once_by_poll(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    store = open_store(folder, "async")
    folder.rmdir()
    store.save(state_of(1), SaveInfo(step=1))
    store.wait_staged()
    with pytest.raises(CheckpointError, match="cannot make a folder"):
        store.finish()
    store.poll()
    folder.mkdir()
    store.save(state_of(2), SaveInfo(step=2))
    store.finish()
    assert verify(folder / "step-00000002") == []


def test_a_number_that_json_has_not_fails_the_save(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(CheckpointError, match="JSON compliant"):
        store.save(state_of(1), SaveInfo(step=1, extra={"best": float("nan")}))
    assert names(tmp_path) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("counts", torch.arange(5))


def test_weights_load_into_a_model_from_a_run_directory(tmp_path: Path) -> None:
    trained, fresh = Tied(), Tied()
    state = {"model.embedding.weight": trained.head.weight.detach(), "model.counts": torch.ones(5)}
    state["model.counts"] = torch.full((5,), 9)
    state["optimizer.embedding.weight.exp_avg"] = torch.zeros(5, 3)
    open_store(tmp_path / "checkpoints").save(state, SaveInfo(step=7))
    assert load_weights(tmp_path, fresh).step == 7
    assert torch.equal(fresh.head.weight, trained.head.weight)
    assert fresh.counts.tolist() == [9] * 5


def test_the_manifest_can_be_read_without_the_tensors(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    manifest = read_manifest(tmp_path / "step-00000005")
    assert set(manifest.tensors) == set(state_of(5))
    assert manifest.bytes == sum(
        path.stat().st_size
        for path in (tmp_path / "step-00000005").iterdir()
        if path.name != "manifest.json"
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_transposed_tensor_is_saved_and_read(tmp_path: Path, mode: str) -> None:
    store, turned = open_store(tmp_path, mode), torch.arange(6.0).view(2, 3).T
    store.save({"model.turned": turned}, SaveInfo(step=1))
    store.finish()
    loaded = {"model.turned": torch.zeros(3, 2)}
    found = find_checkpoint(tmp_path)
    load_state(found.path, found.manifest, loaded, None)
    assert torch.equal(loaded["model.turned"], turned)
