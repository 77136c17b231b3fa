"""The recipes for many GPUs fit those GPUs, by their own plan and estimate."""

import json
from pathlib import Path

import pytest

import trainer
from tests.commands import run_trainer

RECIPES = Path(trainer.__file__).parent.resolve() / "recipes"
H100 = 81_559 * 2**20
ROOM = 0.92
"""share of the memory that an estimate may reach"""
CASES = [
    ("moe_1b", 8, 4.0e9),
    ("llama3_8b", 8, 8.03e9),
    ("llama3_70b", 64, 70.6e9),
    ("qwen3_30b_a3b", 64, 30.5e9),
    ("gpt_oss_20b", 64, 20.9e9),
    ("llama3_405b", 1024, 405.9e9),
    ("deepseek_v3_671b", 1024, 684.5e9),
]


def report(command, name, world, folder):
    recipe = RECIPES / f"{name}.toml"
    arguments = (command, recipe, "--world", world, "--json")
    done = run_trainer(*map(str, arguments), folder=folder, XDG_CACHE_HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "world", "parameters"), CASES)
def test_a_recipe_is_planned_and_fits_an_h100(name, world, parameters, tmp_path):
    plan = report("plan", name, world, tmp_path)
    replicas = plan["degrees"]["replicate"]
    held = sum(needs["parameters"] for needs in plan["needs"]) * world / len(plan["needs"])
    assert held / replicas == pytest.approx(parameters, rel=0.01)
    ranks = report("estimate-memory", name, world, tmp_path)["ranks"]
    assert max(rank["total_bytes"] for rank in ranks) < ROOM * H100
