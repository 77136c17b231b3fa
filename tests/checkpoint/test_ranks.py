"""Saving on some ranks and loading on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.checkpoint.store import CheckpointStore

from ..distributed import run_ranks
from .states import blank, state_of

PLACEMENTS = {"sharded": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}


def group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo") if dist.is_initialized() else None


def placed(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """Turn tensors into DTensors over all ranks; "plain" and one process leave them alone."""
    if how == "plain" or not dist.is_initialized():
        return state
    if how == "hybrid":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
        placements = [Replicate(), Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        placements = PLACEMENTS[how]
    return {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        if tensor.ndim > 1 - (placements[-1] == Shard(0))
        else tensor
        for name, tensor in state.items()
    }


def save(folder: Path, how: str, mode: str) -> list[str]:
    store = CheckpointStore(folder, mode=mode, keep=2, group=group())
    store.probe()
    assert store.latest() is None
    for step in (1, 2, 3):
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = {f"rng.{rank}.torch": torch.tensor([step, rank])}
        state = placed(state_of(step), how) | own
        store.save(state, SaveInfo(step=step))
        store.wait_staged()
        for tensor in state.values():
            tensor.zero_()
    store.finish()
    return sorted(path.name for path in folder.iterdir())


def load(folder: Path, how: str) -> dict[str, Any]:
    store = CheckpointStore(folder, mode="sync", keep=2, group=group())
    found = store.latest()
    assert found is not None
    state = placed(blank(), how)
    load_state(found.path, found.manifest, state, store.group)
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.items()
    }
    return {name: tensor.float().numpy() for name, tensor in whole.items()}


@pytest.mark.parametrize(
    ("saved_on", "saved_as", "mode", "loaded_on", "loaded_as"),
    [
        (2, "sharded", "sync", 1, "plain"),
        (1, "plain", "async", 4, "sharded"),
        (4, "sharded", "async", 2, "columns"),
        (2, "replicated", "async", 4, "hybrid"),
        (4, "hybrid", "async", 1, "plain"),
        (2, "plain", "async", 2, "plain"),
    ],
)
def test_any_ranks_load_what_any_other_ranks_saved(
    tmp_path: Path, saved_on: int, saved_as: str, mode: str, loaded_on: int, loaded_as: str
) -> None:
    for names in run_ranks(saved_on, save, tmp_path, saved_as, mode):
        assert names == ["step-00000002", "step-00000003"]
    files = {path.name for path in (tmp_path / "step-00000003").glob("*.safetensors")}
    assert files == {f"shard-{rank:05d}.safetensors" for rank in range(saved_on)}, (
        "each writes a part"
    )
    expected = state_of(3)
    for loaded in run_ranks(loaded_on, load, tmp_path, loaded_as):
        for name, tensor in expected.items():
            np.testing.assert_array_equal(loaded[name], tensor.float().numpy(), err_msg=name)
    manifest = find_checkpoint(tmp_path).manifest
    assert {f"rng.{rank}.torch" for rank in range(saved_on)} <= set(manifest.tensors)
    own = {"rng.0.torch": torch.zeros(2, dtype=torch.int64)}
    load_state(tmp_path / "step-00000003", manifest, own, None)
    assert own["rng.0.torch"].tolist() == [3, 0]


def save_one_tensor(folder: Path) -> None:
    store = CheckpointStore(folder, mode="async", keep=2, group=group())
    store.probe()
    for step in (1, 2):
        store.save({"model.weight": torch.full((3,), float(step))}, SaveInfo(step=step))
        store.wait_staged()
    store.finish()


def test_a_rank_may_have_nothing_to_write(tmp_path: Path) -> None:
    run_ranks(3, save_one_tensor, tmp_path)
    found = find_checkpoint(tmp_path)
    loaded = {"model.weight": torch.zeros(3)}
    load_state(found.path, found.manifest, loaded, None)
    assert loaded["model.weight"].tolist() == [2, 2, 2]


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after some AdamW steps, fully sharded where there are ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if dist.is_initialized():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.full((4, 5), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = {f"model.{name}": weight.detach() for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        for key, value in optimizer.state[weight].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def save_fsdp(folder: Path) -> None:
    store = CheckpointStore(folder, mode="async", keep=2, group=group())
    model, optimizer = trained(2)
    store.save(whole_state(model, optimizer), SaveInfo(step=2))
    model(torch.ones(4, 5)).sum().backward()  # shards are gathered and freed meanwhile
    store.wait_staged()
    optimizer.step()
    store.finish()


def load_fsdp(folder: Path) -> dict[str, Any]:
    found = find_checkpoint(folder)
    model, optimizer = trained(1)
    state = whole_state(model, optimizer)
    load_state(found.path, found.manifest, state, group())
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()
        for name, tensor in state.items()
    }


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), (1, 4), (2, 2)])
def test_fsdp_training_state_survives_a_change_of_ranks(
    tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    run_ranks(saved_on, save_fsdp, tmp_path)
    model, optimizer = trained(2)
    expected = whole_state(model, optimizer)
    for loaded in run_ranks(loaded_on, load_fsdp, tmp_path):
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_allclose(loaded[name], tensor.numpy(), rtol=1e-5, atol=1e-6)
