"""Runs in processes of their own that start in a fraction of a second, for tests that end them."""

import faulthandler
import json
import os
import sys
import time

import torch

from tests.distributed import CONTEXT
from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.core.errors import TrainerError
from trainer.engine.launch.environment import ATTEMPT, STORE, find_world
from trainer.engine.recipe.load import load_recipe

MODEL = """
[model]
dim = 48
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 96
"""
EXPERTS = """
[model]
name = "deepseek_v3"
dim = 48
n_layers = 4
n_heads = 4
ffn_dim = 96
n_dense_layers = 1
[model.moe]
num_experts = 8
expert_ffn_dim = 24
score = "sigmoid"
num_shared = 1
balance_bias = true
bias_rate = 0.01
aux_weight = 0.01
"""
RECIPE = """
[run]
steps = {steps}
dir = "{folder}"
name = "run"
seed = 5
{model}
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


def rank_process(recipe, overrides, environment, allow_changed, before, fault):
    """Run the recipe as `trainer run` does, and end with its exit code."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    from trainer.engine.run.run import run

    with (recipe.parent / "stderr.txt").open("a", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), 2)
    faulthandler.enable(2)
    try:
        if before is not None:
            before()
        if fault:
            os.environ["TRAINER_FAULT"] = fault
        world = find_world()
        loaded = load_recipe(recipe, overrides, world=world.world_size)
        code = run(loaded.recipe, world, allow_changed=allow_changed)
    except TrainerError as error:
        print(error.render(), file=sys.stderr, flush=True)
        code = error.exit_code
    os._exit(code)


def start(
    recipe, world=1, attempt=0, overrides=(), *, allow_changed=(), before=None, fault="", marks=None
):
    """Start the ranks of a run.

    Args:
        before: a function at the top level of a module, called first in each process.
        fault: what `TRAINER_FAULT` would say.
        marks: the folder of `TRAINER_FAULT_MARKS`.
    """
    processes = []
    for rank in range(world):
        environment = {"TRAINER_FAULT_MARKS": str(marks)} if marks else {}
        if world > 1:
            environment |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                STORE: str(recipe.parent / f"store-{attempt}"),
                ATTEMPT: str(attempt),
            }
        arguments = (recipe, overrides, environment, allow_changed, before, fault)
        process = CONTEXT.Process(target=rank_process, args=arguments)
        process.start()
        processes.append(process)
    return processes


def complaints(recipe):
    """Return what the processes of a recipe wrote to stderr."""
    return (recipe.parent / "stderr.txt").read_text(encoding="utf-8")


def finish(processes, timeout=60):
    """Return the exit codes; None for a process that had to be killed at the time limit."""
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


def write_recipe(folder, steps=100, model=MODEL):
    """Write the recipe; its run directory is `folder`/run."""
    folder.mkdir()
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(steps=steps, folder=folder, model=model), encoding="utf-8")
    return path


def rows(folder, kind="train"):
    """Return the rows of metrics.jsonl of a kind."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def tensors(folder):
    """Return step and tensors of the newest checkpoint."""
    return newest(folder / "run")


def newest(run):
    """Return step and tensors of the newest checkpoint of a run directory."""
    found = find_checkpoint(run)
    state = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in found.manifest.tensors.items()
    }
    load_state(found.path, found.manifest, state, None)
    return found.manifest.step, state
