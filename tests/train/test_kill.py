"""`kill -9` at random moments costs nothing but time: the run is the one without interruption."""

import json
import os
import random
import time

import pytest
import torch
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.launch.environment import ATTEMPT, STORE, find_world
from trainer.engine.recipe.load import load_recipe

from tests.distributed import CONTEXT

STEPS = 100
KILLS = 20
RECIPE = """
[run]
steps = {steps}
dir = "{folder}"
name = "run"
seed = 5
[model]
dim = 48
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 96
[data]
seq_len = 48
global_batch = 8
micro_batch = 2
packing = "documents"
[[data.sources]]
name = "synthetic"
num_documents = 300
document_tokens = 40
[optimizer]
lr = 1e-2
[schedule]
warmup_steps = 5
[checkpoint]
interval = 3
mode = "async"
[evaluate]
interval = 20
steps = 2
[metrics]
interval = 1
"""


def rank_process(recipe, overrides, environment):
    os.environ.update(environment)
    torch.set_num_threads(1)
    from trainer.engine.run import run

    world = find_world()
    loaded = load_recipe(recipe, overrides, world=world.world_size)
    os._exit(run(loaded, world))


def start(recipe, world, attempt, overrides=()):
    processes = []
    for rank in range(world):
        environment = {}
        if world > 1:
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                STORE: str(recipe.parent / f"store-{attempt}"),
                ATTEMPT: str(attempt),
            }
        process = CONTEXT.Process(target=rank_process, args=(recipe, overrides, environment))
        process.start()
        processes.append(process)
    return processes


def finish(processes, timeout=60):
    for process in processes:
        process.join(timeout)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def wait_for_lines(path, lines, processes):
    """Return when a file has so many lines or a process has ended."""
    while all(process.is_alive() for process in processes):
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.002)


def write_recipe(folder, steps=STEPS):
    folder.mkdir()
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(steps=steps, folder=folder), encoding="utf-8")
    return path


def rows(folder, kind="train"):
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def tensors(folder):
    found = find_checkpoint(folder / "run")
    state = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in found.manifest.tensors.items()
    }
    load_state(found.path, found.manifest, state, None)
    return found.manifest.step, state


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


@pytest.mark.parametrize("world", [1, 2])
def test_twenty_kills_at_random_moments_leave_the_run_bit_for_bit(tmp_path, world):
    reference = write_recipe(tmp_path / "reference")
    assert finish(start(reference, world, 0)) == [0] * world
    recipe = write_recipe(tmp_path / "killed")
    chance = random.Random(world)
    metrics = tmp_path / "killed" / "run" / "metrics.jsonl"
    for attempt in range(KILLS):
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
    assert finish(start(recipe, world, KILLS)) == [0] * world
    assert_same_run(tmp_path / "killed", tmp_path / "reference")


def test_a_run_moves_between_numbers_of_ranks(tmp_path):
    """2 ranks, then 1, then 4, then 2: the samples are the same, so are the losses to 1e-6."""
    reference = write_recipe(tmp_path / "reference", steps=40)
    assert finish(start(reference, 1, 0)) == [0]
    recipe = write_recipe(tmp_path / "moved", steps=40)
    for attempt, (world, steps) in enumerate([(2, 10), (1, 20), (4, 30), (2, 40)]):
        overrides = [f"run.steps={steps}", "schedule.name=constant"]
        assert finish(start(recipe, world, attempt, overrides)) == [0] * world
    again = write_recipe(tmp_path / "constant", steps=40)
    assert finish(start(again, 1, 0, ["schedule.name=constant"])) == [0]
    expected = [(row["step"], row["tokens"]) for row in rows(tmp_path / "constant")]
    assert [(row["step"], row["tokens"]) for row in rows(tmp_path / "moved")] == expected
    losses = [row["loss"] for row in rows(tmp_path / "moved")]
    assert losses == pytest.approx([row["loss"] for row in rows(tmp_path / "constant")], abs=1e-6)
