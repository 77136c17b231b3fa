"""Runs with Muon: under plans, resumed, with the keys of a recipe."""

import json

import pytest
import torch

from tests.commands import run_trainer
from tests.distributed import run_ranks
from tests.train.plans import BASE, recipe_with, weights
from tests.train.processes import newest
from trainer.engine.core.errors import RecipeError
from trainer.engine.optim.matrix.tables import Muon, MuonH
from trainer.engine.recipe.load import load_recipe

MUON = {"name": "muon", "lr": 0.01, "clip_norm": 0.5}
PLANS = {
    "shard": (2, {"shard": 2}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (4, {"pipeline": 2, "shard": 2}),
    "offload": (2, {"fsdp": {"offload": True}}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_training_under_plans_gives_the_weights_of_one_process(plan):
    world, parallel = PLANS[plan]
    changes = {"optimizer": MUON, "run": BASE["run"] | {"steps": 5}}
    (expected,) = run_ranks(1, weights, recipe_with(**changes))
    found = {}
    for part in run_ranks(world, weights, recipe_with(**changes, parallel=parallel)):
        found |= part
    for name, weight in expected.items():
        # In fp32 each iteration multiplies rounding differences of the gradients by up to 3.4.
        assert found[name] == pytest.approx(weight, abs=2e-4), name


RECIPE = """
[run]
name = "few"
steps = 6
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 64
[data]
seq_len = 32
global_batch = 8
[[data.sources]]
name = "synthetic"
[precision]
compute = "fp32"
[schedule]
name = "constant"
[evaluate]
interval = 0
[metrics]
interval = 1
[optimizer]
name = "muon"
{keys}
"""


def write(folder, keys=""):
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(keys=keys))
    return recipe


def rows_of(folder):
    lines = (folder / "runs/few/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def test_a_run_resumes_under_another_plan(tmp_path):
    losses, states = [], []
    plans = {"through": [(6, "shard=1", 1)], "resumed": [(3, "shard=2", 2), (6, "tensor=2", 2)]}
    for name, runs in plans.items():
        (tmp_path / name).mkdir()
        recipe = write(tmp_path / name)
        for steps, parallel, ranks in runs:
            words = ["--set", f"run.steps={steps}", "--set", f"parallel.{parallel}"]
            done = run_trainer("run", recipe, *words, folder=tmp_path / name, ranks=ranks)
            assert done.returncode == 0, done.stderr
        losses.append([row["loss"] for row in rows_of(tmp_path / name)])
        state = newest(tmp_path / name / "runs/few")[1]
        states.append({key: each for key, each in state.items() if not key.startswith("rng.")})
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    through, resumed = states
    assert through.keys() == resumed.keys()
    assert "optimizer.layers.0.mlp.down.weight.momentum_buffer" in through
    for name, value in through.items():
        torch.testing.assert_close(resumed[name], value, atol=2e-5, rtol=1e-3)


def test_rows_show_the_rate_of_each_group(tmp_path):
    keys = 'adamw = { lr = 1e-3 }\n[[optimizer.groups]]\nmatch = "*.q.weight"\nlr = 0.02'
    done = run_trainer("run", write(tmp_path, keys), "--set", "run.steps=1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(tmp_path)
    assert (row["lr"], row["lr_adamw"], row["lr_group_0"]) == (3e-4, 1e-3, 0.02)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("scale = 'orig'", r'optimizer.scale.*did you mean "original"'),
        ("adamw = { lrr = 1 }", r'optimizer.adamw.lrr: unknown key.*did you mean "lr"'),
        ("[memory]\noptimizer_in_backward = true", "memory.optimizer_in_backward.*together"),
        ("[precision]\nparameters = 'bf16'", "precision.parameters.*fp32"),
        ("[[optimizer.groups]]\nmatch = '*.norm.weight'\nmomentum = 0.9",
         "optimizer.groups.0.momentum.*matches no matrix"),
        ("[[optimizer.groups]]\nmatch = '*.q.weight'\neps = 1e-3",
         "optimizer.groups.0.eps.*matches only matrices"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_key(keys, words, tmp_path):
    recipe = write(tmp_path, keys)
    text = recipe.read_text()
    if "[precision]" in keys:
        recipe.write_text(text.replace('[precision]\ncompute = "fp32"\n', "", 1))
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe)


def test_keys_of_adamw_keep_the_default_rate_beside_matrices_that_keep_their_norms():
    config = MuonH(adamw={"betas": (0.9, 0.99)}, weight_decay=0.2)
    assert config.rates_of(is_matrix=False) == (3e-4, 0.2)
    assert Muon(lr=0.05, adamw={"eps": 1e-6}).rates_of(is_matrix=False) == (0.05, 0.1)


def test_a_rate_for_adamw_is_warned_about():
    assert list(Muon(lr=3e-5, scale="original").warnings())
    assert list(Muon(scale="original").warnings())
    assert not list(Muon(lr=3e-5).warnings())
    assert not list(Muon(lr=0.02, scale="original").warnings())
