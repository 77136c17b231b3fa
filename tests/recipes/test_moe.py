"""The shipped mixtures of experts: the small one trains, the large one is planned."""

import json
import os
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import pytest

import trainer
from tests.commands import run_trainer
from trainer.engine.recipe.load import load_recipe

RECIPES = Path(trainer.__file__).parent.resolve() / "recipes"
SHORT = ["checkpoint.mode=sync", "evaluate.interval=0", "metrics.interval=1"]
SHORT += ["data.seq_len=64", "data.micro_batch=4", "data.global_batch=16"]
SHORT += ["precision.compute=fp32", "run.steps=24"]


def command(folder, *arguments):
    """Return a command of ours as it is run, and its environment."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONUNBUFFERED": "1"}
    line = [sys.executable, "-P", "-m", "trainer", *map(str, arguments)]
    return {"args": line, "cwd": folder, "env": environment, "text": True}


def output(folder, *arguments, ranks=1):
    done = run_trainer(*arguments, folder=folder, ranks=ranks, XDG_CACHE_HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def settings(name, *more):
    found = ["--set", f"run.name={name}"]
    for each in (*SHORT, *more):
        found += ["--set", each]
    return found


def rows(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_trains_goes_on_after_a_signal_and_shares_its_experts(tmp_path):
    recipe = RECIPES / "moe_debug.toml"
    output(tmp_path, "run", recipe, *settings("whole"))
    whole = [row["loss"] for row in rows(tmp_path, "whole")]
    assert whole[-1] < whole[0] - 1

    process = subprocess.Popen(
        **command(tmp_path, "run", recipe, *settings("parts")), stdout=subprocess.DEVNULL
    )
    log = tmp_path / "runs" / "parts" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 4):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 75
    assert 4 < len(rows(tmp_path, "parts")) < 24
    output(tmp_path, "run", recipe, *settings("parts"))
    assert [row["loss"] for row in rows(tmp_path, "parts")] == whole

    output(tmp_path, "run", recipe, *settings("shared", "parallel.expert=2"), ranks=2)
    assert [row["loss"] for row in rows(tmp_path, "shared")] == pytest.approx(whole, abs=1e-3)


CASES = [
    (8, 8),
    *(pytest.param(*case, marks=pytest.mark.matrix) for case in ((1, 1), (8, 1), (64, 8))),
]


def parameters_of(recipe):
    loaded = load_recipe(recipe).recipe
    shapes = loaded.model.with_vocab(loaded.vocab_size).parameter_shapes()
    return sum(prod(shape) for shape in shapes.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "expert"), CASES)
def test_the_large_one_is_planned(world, expert, tmp_path):
    recipe = RECIPES / "moe_1b.toml"
    changes = ["--world", world, "--set", f"parallel.expert={expert}"]
    # One micro batch on each rank: others are simulated once more.
    changes += ["--set", f"data.global_batch={4 * world}"]
    plan = json.loads(output(tmp_path, "plan", recipe, *changes, "--json"))
    total = parameters_of(recipe)
    assert 3.9e9 < total < 4.1e9
    (needs,) = plan["needs"]
    assert needs["parameters"] == pytest.approx(total / world, rel=0.01)
    kinds = {flow["kind"] for flow in needs["flows"]}
    assert ("all-to-all" in kinds) == (expert > 1)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world", "expert"), [(1, 1), (8, 1), (8, 8), (64, 8)])
def test_the_memory_of_the_large_one_is_estimated(world, expert, tmp_path):
    recipe = RECIPES / "moe_1b.toml"
    changes = ["--world", world, "--set", f"parallel.expert={expert}"]
    report = json.loads(output(tmp_path, "estimate-memory", recipe, *changes, "--json"))
    (held,) = report["ranks"]
    total = parameters_of(recipe)
    # AdamW's two numbers of each weight, and a step count of each tensor.
    assert held["at_peak"]["optimizer"] == pytest.approx(8 * total / world, rel=0.01)
    assert held["at_peak"]["parameters"] == pytest.approx(4 * total / world, rel=0.01)
