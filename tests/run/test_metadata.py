"""The record that each attempt at a run leaves, and the id of a run."""

import json
import subprocess

import pytest
import tomli

from tests.run.conftest import RECIPE
from trainer.engine.checkpoint.manifest import read_manifest
from trainer.engine.core.run_state import read_state
from trainer.engine.core.text.display import redact_text
from trainer.engine.run.metadata import Checkout, find_checkouts, name_run


def git(folder, *words):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *settings, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, command):
    """Make the folder of the command a git checkout with one commit."""
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", "recipe.toml", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def record(run, number):
    return json.loads((run / "metadata" / number / "run.json").read_text())


def test_each_attempt_leaves_a_record_of_its_code_and_recipe(command, checkout):
    run = checkout / "runs" / "r"
    assert command("run", "recipe.toml", "--set=run.steps=2", "--set=optimizer.lr=1e-3")[0] == 0
    (checkout / "code.py").write_text("x = 2\n")
    assert command("run", "runs/r", "--set=run.steps=4")[0] == 0
    assert sorted(each.name for each in (run / "metadata").iterdir()) == ["0001", "0002"]
    first, second = record(run, "0001"), record(run, "0002")
    (here,) = [each for each in first["code"] if each["holds"] == "working directory"]
    assert here["commit"] == git(checkout, "rev-parse", "HEAD")
    assert here["id"] == here["commit"][:12]
    assert not (run / "metadata" / "0001" / "working-directory.diff").exists()
    (there,) = [each for each in second["code"] if each["holds"] == "working directory"]
    assert there["id"].startswith(here["id"] + "+")
    diff = (run / "metadata" / "0002" / "working-directory.diff").read_text()
    assert {"-x = 1", "+x = 2"} <= {*diff.splitlines()}
    # The code changed, and the run resumed all the same.
    saved = [read_manifest(run / "checkpoints" / f"step-0000000{step}").run_id for step in (2, 4)]
    assert saved == [first["run_id"], second["run_id"]]
    assert saved[0] != saved[1] == read_state(run).run_id
    assert (first["attempt"], second["attempt"]) == (0, 1)
    changed = tomli.loads((run / "metadata" / "0001" / "changed.toml").read_text())
    assert changed["optimizer"]["lr"] == 1e-3
    expected = tomli.loads(RECIPE)
    assert changed["run"] == {"name": "r", "steps": 2}
    assert {"name": "llama3", **expected["model"]}.items() >= changed["model"].items()
    full = tomli.loads((run / "metadata" / "0001" / "recipe.toml").read_text())
    assert full["optimizer"]["betas"] == [0.9, 0.95]


def test_without_a_checkout_the_id_is_the_version_and_the_recipe():
    assert name_run([], "0123456789abcdef") == "0.1.0-0123456789ab"
    package = Checkout("package", "/p", "c" * 40, "")
    other = Checkout("working directory", "/w", "d" * 40, "changes")
    assert name_run([package], "0" * 32) == f"{'c' * 12}-{'0' * 12}"
    assert name_run([other], "0" * 32).startswith(f"0.1.0-{'d' * 12}+")


def test_programs_that_a_checkout_names_are_not_run(checkout, monkeypatch):
    git(checkout, "config", "diff.external", "touch ran;")
    git(checkout, "config", "core.fsmonitor", "touch ran;")
    (checkout / "code.py").write_text("x = 2\n")
    (found,) = [each for each in find_checkouts() if each.folder == str(checkout)]
    assert "+x = 2" in found.diff
    assert not (checkout / "ran").exists()


def test_secrets_are_left_out_of_every_file(command, checkout, monkeypatch):
    monkeypatch.setenv("SERVICE_API_KEY", "value-of-a-variable")
    (checkout / "code.py").write_text(
        'api_key = "sk-in-code-123"\nurl = "https://me:my-password@host/x"\n'
        'v = "value-of-a-variable"\n'
    )
    words = ["trainer", "run", "--set", "tracker.password=on-the-line", "--set=a.token=as-one-word"]
    monkeypatch.setattr("sys.argv", words)
    assert command("run", "recipe.toml", "--set=run.steps=2")[0] == 0
    folder = checkout / "runs" / "r" / "metadata" / "0001"
    text = "".join(file.read_text() for file in folder.iterdir())
    secrets = ["sk-in-code", "my-password", "value-of-a-variable", "on-the-line", "as-one-word"]
    assert [each for each in secrets if each in text] == []
    assert text.count("[redacted]") >= len(secrets)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("+password: hunter22", "hunter22"),
        ('"hf_token": "hf_abcdef"', "hf_abcdef"),
        ("AWS_SECRET_KEY=abcdefgh", "abcdefgh"),
        ("token := 'abcdefgh'", "abcdefgh"),
    ],
)
def test_values_after_the_names_of_secrets_are_left_out(text, secret):
    assert secret not in redact_text(text)
    for ordinary in ("tokens = 12345", "max_new_tokens=200", "tokenizer = 'bytes'"):
        assert redact_text(ordinary) == ordinary


def test_a_run_continues_without_a_record_that_cannot_be_written(command, tmp_path):
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "metadata").touch()
    code, shown, errors = command("run", "recipe.toml", "--set=run.steps=2")
    assert (code, "no record in" in shown + errors) == (0, True)
