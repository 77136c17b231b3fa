"""Passwords in a recipe: used by the run, and in no file that it leaves."""

import json

import pytest

import trainer
from trainer.cli import main as cli
from trainer.engine.core.errors import RecipeError
from trainer.engine.core.run_state import RunState, record_attempt
from trainer.engine.core.text.display import redact, remove_secret
from trainer.engine.observe.tables import MLflow

RECIPE = """
[run]
name = "one"
steps = 2
[model]
name = "llama3"
flavor = "debug"
dim = 8
n_heads = 1
n_kv_heads = 1
n_layers = 1
[data]
seq_len = 16
global_batch = 2
cache_dir = "cache"
[[data.sources]]
name = "synthetic"
num_documents = 100
[schedule]
name = "constant"
[evaluate]
interval = 0
[[metrics.trackers]]
name = "mlflow"
tracking_uri = "https://me:PASSWORD@host/x?api_key=PASSWORD"
"""


class Tracker:
    def log(self, row):
        pass

    def close(self):
        pass


def files_with(folder, text):
    return [
        path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()
    ]


def test_no_file_of_a_run_has_a_password_and_another_password_resumes(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        MLflow, "build", lambda self, *_: seen.append(self.tracking_uri) or Tracker()
    )
    monkeypatch.chdir(tmp_path)
    for password, steps in (("canary", 2), ("sparrow", 4)):
        (tmp_path / "recipe.toml").write_text(RECIPE.replace("PASSWORD", password))
        result = trainer.train(trainer.load_recipe("recipe.toml", {"run.steps": steps}))
        assert f"me:{password}@" in seen[-1]
        assert files_with(tmp_path / "runs", password) == []
    assert result.rows[-1]["step"] == 4
    kept = (tmp_path / "runs" / "one" / "recipe.toml").read_text()
    assert 'tracking_uri = "https://[redacted]@host/x?api_key=[redacted]"' in kept
    with pytest.raises(RecipeError) as caught:
        trainer.load_recipe("runs/one/recipe.toml")
    [problem] = caught.value.problems
    assert (problem.key, "write it again" in problem.message) == (
        "metrics.trackers.0.tracking_uri",
        True,
    )


def test_the_reason_of_a_failure_is_kept_without_passwords(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "nightingale")
    with pytest.raises(OSError, match="canary"), record_attempt(RunState(total_steps=1), tmp_path):
        raise OSError("https://me:canary@host: no, nightingale")
    assert json.loads((tmp_path / "state.json").read_text())["reason"] == (
        "OSError: https://[redacted]@host: no, [redacted]"
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("https://me:pass@word@host/a@b", "https://[redacted]@host/a@b"),
        ("mysql+pymysql://me:canary@host/db", "mysql+pymysql://[redacted]@host/db"),
        ("postgresql://host/db?user=me&password=canary", "[redacted]"),
        ("https://host/x?a=1&hf_token=canary", "https://host/x?a=1&hf_token=[redacted]"),
        ("https://host:5000/x?mail=a@b", "https://host:5000/x?mail=a@b"),
        ("allenai/c4", "allenai/c4"),
    ],
)
def test_addresses_lose_their_passwords_alone(text, kept):
    found = redact(text, {})
    assert "canary" not in found
    assert found.endswith(kept)


def test_settings_lose_them_too():
    assert remove_secret("a.api_key=canary") == "a.api_key=[redacted]"
    assert remove_secret("run.steps=3") == "run.steps=3"


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "slurm", "recipe.toml"],
        ["sweep", "recipe.toml", "--grid", "run.seed=1", "--slurm"],
    ],
)
def test_a_batch_script_never_holds_one(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    address = "metrics.trackers.0.tracking_uri=https://me:canary@host"
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--set", address])
    assert stop.value.code == 2
    assert "the script would hold its password" in capsys.readouterr().err
    assert files_with(tmp_path, "canary") == []
