"""`kill -9` at random moments costs nothing but time: the run is the one without interruption."""

import random
import time

import pytest
import torch

from tests.cases import also
from tests.train.processes import finish, rows, start, tensors, wait_for_lines, write_recipe


def assert_same_run(folder, reference):
    for kind, keys in {
        "train": ("step", "loss", "grad_norm", "lr", "tokens"),
        "eval": ("step", "loss"),
    }.items():
        got = [[row[key] for key in keys] for row in rows(folder, kind)]
        assert got == [[row[key] for key in keys] for row in rows(reference, kind)]
    step, state = tensors(folder)
    expected_step, expected = tensors(reference)
    assert step == expected_step
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("world", "kills", "steps"), [(1, 5, 60), *also((1, 20, 200), (2, 20, 200))]
)
def test_kills_at_random_moments_leave_the_run_bit_for_bit(tmp_path, world, kills, steps):
    reference = write_recipe(tmp_path / "reference", steps)
    assert finish(start(reference, world, 0)) == [0] * world
    recipe = write_recipe(tmp_path / "killed", steps)
    chance = random.Random(world)
    metrics = tmp_path / "killed" / "run" / "metrics.jsonl"
    for attempt in range(kills):
        before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        processes = start(recipe, world, attempt)
        wait_for_lines(metrics, before + chance.randrange(-4, 9), processes)
        time.sleep(chance.uniform(0, 0.05))
        both = chance.random() < 0.5
        victims = processes if both else processes[-1:]
        assert all(process.is_alive() for process in victims), "finished before the last kill"
        for process in victims:
            process.kill()
        for process in processes:  # as the launcher does with the survivor of a pair
            process.join(2)
            process.kill()
            process.join()
    assert finish(start(recipe, world, kills)) == [0] * world
    assert_same_run(tmp_path / "killed", tmp_path / "reference")


def test_a_run_moves_between_numbers_of_ranks(tmp_path):
    """2 ranks, then 1, then 4, then 2: the samples are the same, so are the losses to 1e-6."""
    settings = ["schedule.name=constant", "precision.compute=fp32", "optimizer.lr=1e-3"]
    reference = write_recipe(tmp_path / "reference", 20)
    assert finish(start(reference, 1, overrides=settings)) == [0]
    recipe = write_recipe(tmp_path / "moved", 20)
    for attempt, (world, steps) in enumerate([(2, 5), (1, 10), (4, 15), (2, 20)]):
        until = [*settings, f"run.steps={steps}"]
        assert finish(start(recipe, world, attempt, until)) == [0] * world
    moved, expected = rows(tmp_path / "moved"), rows(tmp_path / "reference")
    for key in ("step", "tokens"):
        assert [row[key] for row in moved] == [row[key] for row in expected]
    losses = [row["loss"] for row in moved]
    assert losses == pytest.approx([row["loss"] for row in expected], abs=1e-6)
