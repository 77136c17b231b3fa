"""`trainer checkpoint list|inspect|verify|prune`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trainer.cli.checkpoint import app
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.store import CheckpointStore
from trainer.engine.core.errors import CheckpointError, ExitCode, RecipeError, RunInUse
from trainer.engine.core.run_dir import RunDirectory

from ..distributed import ROOT
from .states import open_store, save_steps, state_of


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def parsed(*arguments: object) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory with checkpoints of steps 1 to 4, the newest truncated."""
    save_steps(tmp_path / "checkpoints", 1, 2, 3, 4)
    file = tmp_path / "checkpoints" / "step-00000004" / "shard-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return tmp_path


def test_list_shows_each_checkpoint_and_its_state(run: Path) -> None:
    rows = parsed("list", run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["samples"] for row in rows] == [8, 16, 24, 32]
    assert [bool(row["problems"]) for row in rows] == [False, False, False, True]
    text = call("list", run / "checkpoints").output
    assert "step-00000002" in text
    assert "complete" in text


def test_inspect_takes_the_newest_complete_one(run: Path) -> None:
    shown = parsed("inspect", run)
    assert shown["path"].endswith("step-00000003")
    assert shown["tensors"]["model.half"] == {"shape": [4, 4], "dtype": "bfloat16"}
    text = call("inspect", run / "checkpoints" / "step-00000002", "--tensors").output
    assert "step         2" in text
    assert "model.half  bfloat16 [4, 4]" in text


def test_verify_says_what_is_wrong_and_exits_with_5(run: Path) -> None:
    result = call("verify", run, "--json")
    assert result.exit_code == ExitCode.CHECKPOINT
    assert "shard-00000.safetensors has" in json.loads(result.output)[3]["problems"][0]
    assert call("verify", run / "checkpoints" / "step-00000003").exit_code == 0


def test_verify_reads_every_byte(run: Path) -> None:
    file = run / "checkpoints" / "step-00000001" / "shard-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert parsed("list", run / "checkpoints" / "step-00000001")[0]["problems"] == []
    assert call("verify", run / "checkpoints" / "step-00000001").exit_code == ExitCode.CHECKPOINT


def test_prune_keeps_the_newest_complete_ones(run: Path) -> None:
    folder = run / "checkpoints"
    would = parsed("prune", run, "--keep", 2, "--dry-run")["removed"]
    assert [Path(path).name for path in would] == ["step-00000001"]
    assert len(list(folder.iterdir())) == 4
    assert parsed("prune", run, "--keep", 2, "--keep-every", 1, "--dry-run")["removed"] == []
    call("prune", run, "--keep", 1)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000004"]


def test_milestones_stay_beside_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, mode="sync", keep=1, keep_every=4, group=None)
    for step in range(1, 12):
        store.save(state_of(step), SaveInfo(step=step))
    names = [f"step-{step:08}" for step in (4, 8, 11)]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == names


def test_prune_keeps_the_milestones_of_the_recipe(tmp_path: Path) -> None:
    store = open_store(tmp_path, keep=10)
    for step in range(1, 8):
        info = SaveInfo(step=step, recipe={"checkpoint": {"keep_every": 3}})
        store.save(state_of(step), info)

    def removed(*words: object) -> list[int]:
        paths = parsed("prune", tmp_path, "--keep", 1, "--dry-run", *words)["removed"]
        return [int(path[-1]) for path in paths]

    assert removed() == [1, 2, 4, 5]
    assert removed("--keep-every", 2) == [1, 3, 5]
    assert removed("--keep-every", 0) == [1, 2, 3, 4, 5, 6]
    (tmp_path / "step-00000007" / "manifest.json").write_text("{}")
    assert removed() == [1, 2, 4, 5]


def test_prune_deletes_what_the_run_turned_away_from(tmp_path: Path) -> None:
    store = save_steps(tmp_path, 1, 2, 3)
    store = open_store(tmp_path)
    from trainer.engine.checkpoint.manifest import SaveInfo

    store.save(state_of(2), SaveInfo(step=2))
    removed = parsed("prune", tmp_path, "--keep", 5)["removed"]
    assert ["abandoned" in path for path in removed] == [True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_prune_leaves_a_live_run_alone(run: Path) -> None:
    with RunDirectory(run):
        result = call("prune", run, "--keep", 1)
    assert isinstance(result.exception, RunInUse)
    assert len(list((run / "checkpoints").iterdir())) == 4


@pytest.mark.parametrize("command", [["list"], ["inspect"], ["verify"], ["prune", "--keep", "1"]])
def test_no_checkpoint_is_a_checkpoint_error(tmp_path: Path, command: list[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        result = call(command[0], path, *command[1:])
        assert isinstance(result.exception, CheckpointError)


def test_prune_of_one_checkpoint_is_a_usage_error(run: Path) -> None:
    result = call("prune", run / "checkpoints" / "step-00000001", "--keep", 1)
    assert isinstance(result.exception, RecipeError)


def test_no_command_imports_torch(run: Path) -> None:
    code = (
        "import sys; from trainer.cli.checkpoint import app\n"
        "for words in (['list'], ['inspect'], ['prune', '--keep', '2']):\n"
        "    app([*words, sys.argv[1]], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    path = os.pathsep.join([str(ROOT / ".dev"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-P", "-c", code, str(run)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, timeout=60)
