"""Modules that a recipe names are found beside it, and never in the folder of a run."""

import json

import pytest

from tests.commands import run_trainer

MODULE = """\
from typing import Literal
from beside_speed import SPEED
from trainer.plugins import OptimizerConfig, optimizers

@optimizers.register
class Beside(OptimizerConfig):
    name: Literal["beside"] = "beside"
    speed: float = SPEED
    "how fast it goes"

    def build(self, groups, device):
        import torch
        return torch.optim.SGD(groups, lr=self.lr)
"""
RECIPE = """\
[run]
steps = 2
dir = "runs"
[model]
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
[data]
seq_len = 32
global_batch = 4
[[data.sources]]
name = "synthetic"
num_documents = 20
[optimizer]
name = "beside"
[plugins]
modules = ["beside"]
"""


@pytest.fixture
def trainer(tmp_path):
    """Write a plugin and its recipe to a folder; run commands in another one."""
    (tmp_path / "lab" / "base").mkdir(parents=True)
    (tmp_path / "lab" / "beside.py").write_text(MODULE)
    (tmp_path / "lab" / "beside_speed.py").write_text("SPEED = 3.0\n")
    (tmp_path / "lab" / "recipe.toml").write_text(RECIPE)
    (tmp_path / "here").mkdir()

    def run(*words, ranks=1):
        return run_trainer(*words, folder=tmp_path / "here", ranks=ranks)

    return run


def test_a_module_and_what_it_imports_are_found_beside_the_recipe(trainer, tmp_path):
    done = trainer("explain", "../lab/recipe.toml", "--json")
    assert done.returncode == 0, done.stderr
    assert {"key": "optimizer.speed", "value": 3.0}.items() <= {
        key: value
        for row in json.loads(done.stdout)
        if row["key"] == "optimizer.speed"
        for key, value in row.items()
    }.items()
    (tmp_path / "lab" / "other").mkdir()
    (tmp_path / "lab" / "other" / "more.toml").write_text('extends = ["../recipe.toml"]\n')
    assert trainer("validate", "../lab/other/more.toml").returncode == 0


def test_two_ranks_find_it_and_a_run_resumes_only_after_the_user_names_it(trainer, tmp_path):
    done = trainer("run", "../lab/recipe.toml", ranks=2)
    assert done.returncode == 0, done.stderr
    run = next(tmp_path.rglob("metrics.jsonl")).parent
    done = trainer("run", str(run), "--set", "run.steps=3")
    assert done.returncode == 2
    assert "--plugin beside" in done.stderr
    # The module is neither in the working directory nor where Python looks.
    done = trainer("run", str(run), "--plugin", "beside", "--set", "run.steps=3")
    assert done.returncode == 2
    assert "cannot import 'beside'" in done.stderr
    for name in ("beside.py", "beside_speed.py"):
        (tmp_path / "here" / name).write_text((tmp_path / "lab" / name).read_text())
    settings = ["--plugin", "beside", "--set", "run.steps=3", "--set", "schedule.name=constant"]
    done = trainer("run", str(run), *settings, "--allow-changed", "run.steps,schedule")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sign", ["metrics.jsonl", "manifest.json", "checkpoints"])
def test_a_module_beside_a_run_s_own_recipe_is_not_imported(trainer, tmp_path, sign):
    (tmp_path / "lab" / sign).touch()
    (tmp_path / "lab" / "beside.py").write_text("open('imported', 'w')\n" + MODULE)
    done = trainer("validate", "../lab/recipe.toml")
    assert done.returncode == 2
    assert "cannot import 'beside'" in done.stderr
    assert not (tmp_path / "here" / "imported").exists()


def test_an_installed_module_comes_before_one_beside_the_recipe(trainer, tmp_path):
    (tmp_path / "lab" / "filecmp.py").write_text("open('imported', 'w')\n")
    recipe = RECIPE.replace('"beside"]', '"beside", "filecmp"]')
    (tmp_path / "lab" / "recipe.toml").write_text(recipe)
    done = trainer("validate", "../lab/recipe.toml")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "here" / "imported").exists()
