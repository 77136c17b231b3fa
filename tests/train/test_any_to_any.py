"""A checkpoint written under one plan resumes under any other."""

import shutil

import pytest
import torch

from tests.train.processes import complaints, finish, rows, start, tensors, write_recipe

SETTINGS = [
    "schedule.name=constant",
    "precision.compute=fp32",
    "optimizer.lr=1e-3",
    "schedule.warmup_steps=0",
    "model.n_layers=4",
    "evaluate.interval=0",
]
PLANS = {
    "alone": (1, {}),
    "shard-2": (2, {"shard": 2}),
    "tensor-4": (4, {"tensor": 4}),
    "pipeline-2-tensor-2": (4, {"pipeline": 2, "tensor": 2}),
    "interleaved-2-context-2": (
        4,
        {"pipeline": 2, "context": 2, "pipelining.schedule": "Interleaved1F1B"},
    ),
    "shard-2-context-2-tensor-2": (8, {"shard": 2, "context": 2, "tensor": 2}),
}
QUICK = ("alone", "shard-2", "pipeline-2-tensor-2")
HALF, STEPS = 3, 6


def train(recipe, plan, attempt, steps):
    world, parallel = PLANS[plan]
    settings = [*SETTINGS, f"run.steps={steps}"]
    settings += [f"parallel.{key}={value}" for key, value in parallel.items()]
    assert finish(start(recipe, world, attempt, settings), 300) == [0] * world, complaints(recipe)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train(write_recipe(folder / "run", STEPS), "alone", 0, STEPS)
    return folder / "run"


@pytest.mark.parametrize("first", QUICK)
def test_it_resumes_under_others(first, undisturbed, tmp_path):
    resume(first, set(QUICK) - {first}, undisturbed, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("first", list(PLANS))
def test_it_resumes_under_every_other_plan(first, undisturbed, tmp_path):
    done = set(QUICK) if first in QUICK else {first}
    resume(first, set(PLANS) - done, undisturbed, tmp_path)


def resume(first, others, undisturbed, tmp_path):
    saved = write_recipe(tmp_path / "saved", STEPS)
    train(saved, first, 0, HALF)
    expected = [row["loss"] for row in rows(undisturbed)]
    _, final = tensors(undisturbed)
    for then in sorted(others):
        folder = tmp_path / then
        recipe = write_recipe(folder, STEPS)
        shutil.copytree(tmp_path / "saved" / "run", folder / "run")
        train(recipe, then, 1, STEPS)
        losses = [row["loss"] for row in rows(folder)]
        assert losses == pytest.approx(expected, abs=1e-5), then
        step, found = tensors(folder)
        assert step == STEPS
        for name, tensor in final.items():
            if name.startswith("model."):
                torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
