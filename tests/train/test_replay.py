"""A step of a run computed once more: the recorded numbers, and what each layer had."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.cases import also
from tests.distributed import run_ranks
from tests.train.processes import finish, rows, start, write_recipe
from tests.train.test_health import outlier
from trainer.engine.core.errors import CheckpointError, RecipeError
from trainer.engine.launch.environment import World
from trainer.engine.recipe.load import load_recipe
from trainer.engine.run.replay import replay
from trainer.engine.train.probe import Sums, measure, merge

FP32 = ["precision.compute=fp32", "resilience.spike_window=8"]


def replayed(path, overrides, word):
    """Replay on this rank; return the numbers, plain."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    world = World(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    recipe = load_recipe(path, overrides, world=size).recipe
    try:
        found = replay(recipe, world, word)
    except (RecipeError, CheckpointError) as error:
        return error.render()
    layers = {
        name: (sums.activations.rms, sums.activations.largest, sums.gradients.rms,
               sums.weights.norm, sums.weights.largest, sums.activations.non_finite)
        for name, sums in found.layers.items()
    }  # fmt: skip
    return found.loss, found.grad_norm, found.start_step, layers


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def finished_run(folder, overrides=(), world=1, before=None, steps=16):
    recipe = write_recipe(folder, steps=steps)
    assert finish(start(recipe, world, before=before, overrides=[*FP32, *overrides])) == [0] * world
    return recipe


@pytest.mark.parametrize("world", [1, *also(2)])
def test_a_replayed_step_has_the_bits_of_the_run_and_leaves_no_trace(tmp_path, world):
    recipe = finished_run(tmp_path / "run", ["checkpoint.keep=9"], world, outlier)
    before = contents(tmp_path / "run" / "run")
    words = {"spike-14": 14, "step:13": 13, "step:16": 16, "step:2": 2}
    for word, step in words.items() if world == 1 else [("spike-14", 14)]:
        for loss, norm, start_step, layers in run_ranks(world, replayed, recipe, FP32, word):
            row = rows(tmp_path / "run")[step - 1]
            assert loss == row["loss"]
            assert norm * (100 if step == 14 else 1) == pytest.approx(row["grad_norm"], rel=1e-6)
            assert start_step == (step - 1) // 3 * 3
            total = sum(each[3] ** 2 for each in layers.values())
            assert total**0.5 == pytest.approx(norm, rel=1e-5), "layers share out the whole norm"
            assert next(iter(layers)) == "embed"
            assert list(layers)[-1] == "head.proj"
    assert contents(tmp_path / "run" / "run") == before


PLANS = {
    "replicate": ["parallel.replicate=2", "parallel.shard=1"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "data.micro_batch=1"],
    "recompute": ["memory.recompute=full", "parallel.shard=2"],
}


@pytest.mark.parametrize(
    "plan",
    [
        "replicate",
        "pipeline",
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ("tensor", "recompute")),
    ],
)
def test_layers_are_those_of_one_process_under_every_plan(tmp_path, plan):
    recipe = finished_run(tmp_path / "run", steps=6)
    ((loss, norm, _, layers),) = run_ranks(1, replayed, recipe, FP32, "step:5")
    for found in run_ranks(2, replayed, recipe, [*FP32, *PLANS[plan]], "step:5"):
        assert found[:2] == pytest.approx((loss, norm), rel=1e-4)
        assert list(found[3]) == list(layers)
        for name, numbers in layers.items():
            got = list(found[3][name])
            if plan == "tensor" and name == "head.norm":
                got[2] = numbers[2]  # ranks have parts of this gradient that are added later
            assert got == pytest.approx(list(numbers), rel=2e-3, abs=1e-7), name


def test_a_replay_after_a_rollback_reads_the_data_of_then(tmp_path):
    rollback = ["resilience.spike=rollback", "checkpoint.keep=9"]
    recipe = finished_run(tmp_path / "run", rollback, before=outlier)
    overrides = [*FP32, *rollback]
    ((bad, _, first, _),) = run_ranks(1, replayed, recipe, overrides, "spike-14")
    lines = (tmp_path / "run" / "run" / "events.jsonl").read_text().splitlines()
    assert bad == json.loads(lines[0])["loss"]
    assert first == 12
    ((later, *_),) = run_ranks(1, replayed, recipe, overrides, "step:16")
    assert later == rows(tmp_path / "run")[15]["loss"]


def test_unknown_events_and_steps_that_cannot_be_reached_are_refused(tmp_path):
    recipe = finished_run(tmp_path / "run", steps=6)
    (text,) = run_ranks(1, replayed, recipe, FP32, "spike-3")
    assert "has no event 'spike-3'" in text
    assert "or step:N" in text
    (text,) = run_ranks(1, replayed, recipe, FP32, "step:7")
    assert "step 7 is beyond the run's 6 steps" in text
    (text,) = run_ranks(1, replayed, recipe, [*FP32, "optimizer.lr=0.5"], "step:5")
    assert "optimizer.lr" in text
    event = {"id": "spike-5-batch-9", "kind": "spike", "step": 2, "batch": 9}
    (tmp_path / "run" / "run" / "events.jsonl").write_text(json.dumps(event) + "\n")
    (text,) = run_ranks(1, replayed, recipe, FP32, "spike-5-batch-9")
    assert "from a checkpoint that is gone" in text


def test_sums_of_parts_are_those_of_the_whole():
    values = torch.tensor([[1.0, -4.0, float("nan")], [2.0, float("inf"), 0.5]])
    whole = measure(values)
    assert whole == Sums(1 + 16 + 4 + 0.25, 6, 4.0, 2)
    parts = Sums()
    for row in values:
        parts.add(measure(row))
    assert parts == whole
    assert measure(values, share=0.5) == Sums(10.625, 3, 4.0, 1)
    assert merge([{}, {}]) == {}


def command(*words):
    return subprocess.run(
        [sys.executable, "-P", "-m", "trainer", "run", *map(str, words)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.matrix
def test_the_command_prints_a_table_and_json_on_one_process_and_on_two(tmp_path):
    recipe = finished_run(tmp_path / "run")
    before = contents(tmp_path / "run" / "run")
    given = [recipe, *(f"--set={text}" for text in FP32), "--replay=step:16"]
    table = command(*given)
    assert table.returncode == 0, table.stderr
    assert table.stdout.count("the same bits") == 2
    assert "layers.1.attention" in table.stdout
    found = command(*given, "--nproc=2", "--json")
    assert found.returncode == 0, found.stderr
    plain = json.loads(found.stdout)
    assert plain["loss"] == pytest.approx(rows(tmp_path / "run")[15]["loss"], rel=1e-5)
    assert plain["layers"]["layers.0.mlp"]["weights"]["non_finite"] == 0
    assert contents(tmp_path / "run" / "run") == before
    assert command(recipe, "--json").returncode == 2
