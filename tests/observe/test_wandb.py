"""W&B without a network, read back from the file that `wandb sync` would upload."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.engine.core.errors import EnvironmentFault, ExitCode
from trainer.engine.core.extras import install_command
from trainer.engine.observe.metrics import MetricsLog
from trainer.engine.observe.tables import WandB

RECIPE = '[run]\nsteps = 9\n[a]\napi_key = "canary-key"\nplain = 3\n'


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("CANARY_TOKEN", "canary-of-the-environment")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(sys, "argv", ["trainer", "run", "--set", "x=canary-argument"])
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def attempt(run_dir: Path, resume_step: int, last: int, **keys: Any) -> None:
    log = MetricsLog(run_dir / "metrics.jsonl", resume_step)
    tracker = WandB(project="proof", **keys).build(run_dir, resume_step)
    for step in range(resume_step + 1, last + 1):
        row = {"kind": "train", "step": step, "loss": 1 / step, "mfu": None, "time": float(step)}
        row["grad_histogram/embed"] = {"low": 0.0, "high": 4.0, "counts": [step, 1]}
        log.write(row)
        tracker.log(row)
    tracker.close()
    log.close()


def records(path: Path) -> list[Any]:
    """Return the records of a run that has ended, once W&B's process has written the last."""
    deadline = time.monotonic() + 30
    while True:
        found = list(parts(path))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def parts(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def history(run_dir: Path) -> list[tuple[str, int, float]]:
    found = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        run_id = ""
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run_id = record.run.run_id
            elif kind == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json
                         for item in record.history.item}  # fmt: skip
                if "train/loss" in items:
                    counts = items["train/grad_histogram/embed.values"]
                    assert json.loads(counts) == [int(items["_step"]), 1]
                    assert json.loads(items["train/grad_histogram/embed.bins"]) == [0.0, 2.0, 4.0]
                    found.append((run_id, int(items["_step"]), json.loads(items["train/loss"])))
    return found


def test_all_attempts_are_one_run_in_which_each_step_is_once(run_dir: Path) -> None:
    attempt(run_dir, 0, 4)
    attempt(run_dir, 2, 6)
    found = history(run_dir)
    assert [step for _, step, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, _, loss in found] == [1 / step for step in range(1, 7)]
    assert len({run_id for run_id, _, _ in found}) == 1
    assert json.loads((run_dir / "trackers" / "wandb.json").read_text())["run_id"] == found[0][0]


def test_settings_arrive_and_secrets_do_not(run_dir: Path) -> None:
    attempt(run_dir, 0, 1, entity="team", run_name="shown", group="sweep", tags=["a", "b"])
    [path] = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    run = next(each.run for each in records(path) if each.WhichOneof("record_type") == "run")
    assert (run.project, run.entity, run.display_name) == ("proof", "team", "shown")
    assert (run.run_group, list(run.tags)) == ("sweep", ["a", "b"])
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["a"] == {"api_key": "[redacted]", "plain": 3}
    for file in (run_dir / "wandb").rglob("*"):
        if file.is_file() and not file.is_symlink():
            assert b"canary" not in file.read_bytes(), file


def test_without_the_package_the_extra_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentFault) as caught:
        WandB().build(run_dir, 0)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert install_command("wandb") in caught.value.render()


def test_a_service_that_is_down_is_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def down(**settings: Any) -> Any:
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setattr(wandb, "init", down)
    with pytest.raises(EnvironmentFault, match="no route to host"):
        WandB().build(run_dir, 0)
