"""`kill -9` at random moments costs nothing but time: the run equals one without interruption.

Nine cells of 23 kills each, 207 in all: 1, 2 and 4 ranks under each mode of saving.
"""

import random
import time

import pytest
import torch

from tests.train.processes import finish, rows, start, tensors, wait_for_lines, write_recipe

KILLS = 23
QUICK_KILLS = 3
MODES = ("sync", "async", "async_pinned")


def assert_same_run(folder, reference):
    """Compare metrics and the newest checkpoint of two runs, bit for bit."""
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


def kill_at_random(recipe, world, mode, kills, seed):
    """Start a run and kill some or all of its ranks, again and again; return how many died."""
    chance = random.Random(seed)
    settings = [f"checkpoint.mode={mode}"]
    metrics = recipe.parent / "run" / "metrics.jsonl"
    for attempt in range(kills):
        before = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        processes = start(recipe, world, attempt, settings)
        # Sometimes before the first step, sometimes in the middle of a later save.
        wait_for_lines(metrics, before + chance.randrange(-4, 9), processes)
        time.sleep(chance.uniform(0, 0.05))
        victims = chance.choice([processes, processes[-1:], processes[:1]])
        assert all(process.is_alive() for process in victims), "it ended before the kill"
        for process in victims:
            process.kill()
        for process in processes:  # as the launcher does with the survivors
            process.join(2)
            process.kill()
            process.join()
    return finish(start(recipe, world, kills, settings), timeout=200)


def storm(tmp_path, world, mode, kills, steps):
    """Assert that a run that is killed so many times equals one that is not."""
    reference = write_recipe(tmp_path / "reference", steps)
    assert finish(start(reference, world, 0), timeout=200) == [0] * world
    recipe = write_recipe(tmp_path / "killed", steps)
    seed = f"{world} {mode}"
    assert kill_at_random(recipe, world, mode, kills, seed) == [0] * world
    assert_same_run(tmp_path / "killed", tmp_path / "reference")


def test_kills_at_random_moments_leave_the_run_bit_for_bit(tmp_path):
    storm(tmp_path, 1, "async", QUICK_KILLS, steps=40)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_storm_of_kills_leaves_the_run_bit_for_bit(tmp_path, world, mode):
    storm(tmp_path, world, mode, KILLS, steps=230)
