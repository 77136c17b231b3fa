"""A tiny recipe, and the command line in this process."""

import json

import pytest

from tests.commands import run_in_process
from trainer.cli import main as cli

RECIPE = """\
[run]
name = "r"
steps = 4
[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[data]
seq_len = 32
global_batch = 4
micro_batch = 4
[[data.sources]]
name = "synthetic"
[schedule]
name = "constant"
[checkpoint]
interval = 2
[evaluate]
interval = 2
steps = 1
[metrics]
interval = 1
"""


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """Run a command line in this process and a folder with recipe.toml; return code and texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def command(*arguments):
        return run_in_process(capsys, *arguments)

    return command


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Return the folder of a finished run of the recipe, which tests only read."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "recipe.toml").write_text(RECIPE)
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", str(folder / "recipe.toml"), f"--set=run.dir={folder}"])
    assert stop.value.code == 0
    return folder / "r"


def losses(run):
    """Return the losses of a run by step."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
