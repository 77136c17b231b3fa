"""MLflow with a folder as its store, read back with MLflow's own client."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.engine.core.errors import EnvironmentFault, ExitCode
from trainer.engine.core.extras import install_command
from trainer.engine.observe.metrics import MetricsLog
from trainer.engine.observe.tables import MLflow

RECIPE = '[run]\nsteps = 6\n[a]\npassword = "canary-word"\n[[a.list]]\nplain = "x"\n'


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def attempt(run_dir: Path, resume_step: int, last: int, **keys: Any) -> None:
    log = MetricsLog(run_dir / "metrics.jsonl", resume_step)
    tracker = MLflow(**keys).build(run_dir, resume_step)
    for step in range(resume_step + 1, last + 1):
        loss = math.nan if step == 2 else 1 / step
        row = {"kind": "train", "step": step, "loss": loss, "mfu": None, "time": float(step)}
        log.write(row)
        tracker.log(row)
        if step % 2 == 0:
            log.write(evaluated := {**row, "kind": "eval", "loss": 2.0})
            tracker.log(evaluated)
    tracker.close()
    log.close()


def runs(store: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store.as_uri())
    experiment = client.get_experiment_by_name("trainer")
    return client, client.search_runs([experiment.experiment_id])


def test_all_attempts_are_one_run_in_which_each_step_is_once(run_dir: Path) -> None:
    attempt(run_dir, 0, 4)
    client, [stopped] = runs(run_dir.parent / "mlruns")
    assert stopped.info.status == "KILLED", "step 4 of 6"
    attempt(run_dir, 2, 6)
    client, [run] = runs(run_dir.parent / "mlruns")
    assert (run.info.run_id, run.info.status) == (stopped.info.run_id, "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [each.step for each in history] == [1, 2, 3, 4, 5, 6]
    assert [each.timestamp for each in history] == [1000 * step for step in range(1, 7)]
    assert math.isnan(history[1].value)
    assert history[5].value == 1 / 6
    evals = client.get_metric_history(run.info.run_id, "eval/loss")
    assert [each.step for each in evals] == [2, 4, 6]


def test_the_recipe_and_tags_arrive_without_secrets(run_dir: Path) -> None:
    attempt(run_dir, 0, 1, run_name="shown", tags=["team=a", "word"])
    _, [run] = runs(run_dir.parent / "mlruns")
    assert run.info.run_name == "shown"
    assert (run.data.tags["team"], run.data.tags["word"]) == ("a", "true")
    assert run.data.params == {
        "run.steps": "6", "a.password": "[redacted]", "a.list.0.plain": "x",
    }  # fmt: skip
    for path in run_dir.parent.rglob("*"):
        if path.is_file() and path.name != "recipe.toml":
            assert b"canary" not in path.read_bytes(), path


def test_a_run_that_is_gone_there_is_begun_anew_with_all_its_rows(run_dir: Path) -> None:
    attempt(run_dir, 0, 4)
    _, [run] = runs(run_dir.parent / "mlruns")
    shutil.rmtree(run_dir.parent / "mlruns" / run.info.experiment_id / run.info.run_id)
    attempt(run_dir, 4, 6)
    client, [run] = runs(run_dir.parent / "mlruns")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [each.step for each in history] == [1, 2, 3, 4, 5, 6]


def test_a_store_that_cannot_be_used_is_named_without_its_password(run_dir: Path) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        MLflow(tracking_uri="nosuch://me:canary@host/x").build(run_dir, 0)
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert "nosuch://[redacted]@host" in caught.value.render()
    assert "canary" not in caught.value.render()


def test_without_the_package_the_extra_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(EnvironmentFault) as caught:
        MLflow().build(run_dir, 0)
    assert install_command("mlflow") in caught.value.render()
