"""Checkpoints as runs write them: from several ranks, with averages beside the weights."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.models import hf_folder, same_bits, tensors_of
from tests.conversion.run import convert, refused
from tests.distributed import run_ranks
from tests.formats.hf_folders import config_of, empty_model, weights_of
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.store import CheckpointStore
from trainer.engine.recipe.schema import Recipe
from trainer.engine.recipe.tables import Run


def our_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return random weights by our names; rows that 3 ranks cannot divide."""
    torch.manual_seed(seed)
    model = empty_model(config_of(vocab_size=320))
    return {name: torch.randn(p.shape) for name, p in model.named_parameters()}


def info() -> SaveInfo:
    recipe = Recipe(run=Run(steps=1), model=config_of())
    return SaveInfo(step=7, recipe=recipe.model_dump(mode="json"), tokenizer="bytes")


def save_sharded(folder: str, placement: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    square = placement == "both"
    mesh = init_device_mesh("cpu", (2, size // 2) if square else (size,))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in our_weights(3).items():
        ways: dict[str, list[Any]] = {
            "rows": [Shard(0)],
            "columns": [Shard(tensor.dim() - 1)],
            "both": [Shard(0), Shard(1) if tensor.dim() > 1 else Replicate()],
        }
        state[f"model.{name}"] = distribute_tensor(tensor, mesh, ways[placement])
    store = CheckpointStore(Path(folder), mode="sync", keep=1, group=dist.new_group())
    store.probe()
    store.save(state, info(), sync=True)


@pytest.mark.parametrize(("world", "placement"), [(3, "rows"), (2, "columns"), (4, "both")])
def test_parts_of_several_ranks_are_put_together(
    tmp_path: Path, world: int, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.engine.checkpoint import tensors

    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)
    run_ranks(world, save_sharded, str(tmp_path / "checkpoints"), placement)
    assert convert("dcp2hf", tmp_path, tmp_path.parent / f"{tmp_path.name}-hf", "--verify") == 0
    layout = config_of().layout
    expected = {layout.to_hf(name) or "": each for name, each in our_weights(3).items()}
    assert same_bits(tensors_of(tmp_path.parent / f"{tmp_path.name}-hf"), expected)


def test_the_average_is_written_where_there_is_one(tmp_path: Path) -> None:
    weights, average = our_weights(1), our_weights(2)
    del average["embed.weight"]  # as of a frozen weight
    state = {f"model.{name}": each for name, each in weights.items()}
    state |= {f"ema.{name}": each for name, each in average.items()}
    store = CheckpointStore(tmp_path / "run" / "checkpoints", mode="sync", keep=1, group=None)
    store.probe()
    store.save(state, info())
    for word, expected in (("model", weights), ("ema", weights | average)):
        target = tmp_path / f"{word}.pt"
        assert convert("dcp2torch", tmp_path / "run", target, "--weights", word) == 0
        assert same_bits(torch.load(target, weights_only=True), expected)


def test_a_name_that_says_its_step_is_kept(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", tokenizer=False)
    target = tmp_path / "run" / "checkpoints" / "step-00000012"
    assert convert("hf2dcp", source, target) == 0
    assert convert("dcp2torch", tmp_path / "run", tmp_path / "model.pt") == 0


def test_a_newer_checkpoint_that_is_not_whole_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = hf_folder(tmp_path / "hf", tokenizer=False), tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        assert convert("hf2dcp", source, folder / f"step-0000000{step}") == 0
    (folder / "step-00000002" / "shard-00000.safetensors").unlink()
    assert convert("dcp2torch", tmp_path / "run", tmp_path / "model.pt") == 0
    (folder / "step-00000001" / "manifest.json").unlink()
    said = refused(capsys, 5, "dcp2torch", tmp_path / "run", tmp_path / "other.pt")
    assert "step-00000002: shard-00000.safetensors is missing" in said
    assert "no manifest.json" in said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_and_a_log_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_folder(tmp_path / "hf", tokenizer=False)
    size = sum(each.nbytes for each in weights_of(config_of()).values())
    monkeypatch.setenv("TERM", "xterm")
    screens = [Terminal(), io.StringIO()]
    for number, screen in enumerate(screens):
        monkeypatch.setattr(sys, "stderr", screen)
        assert convert("hf2hf", source, tmp_path / str(number), "--verify") == 0
    assert f"{2 * size / 1000:.1f}/{2 * size / 1000:.1f} kB" in screens[0].getvalue()
    assert screens[1].getvalue() == ""
