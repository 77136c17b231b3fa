"""`kill -9` at random moments of a process that saves and prunes all the time."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
from torch import Tensor

from trainer.engine.checkpoint.find import IntactCheckpoint, find_checkpoint
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.reader import load_state

from ..distributed import CONTEXT
from .states import open_store

KILLS = 12
LONGEST = 0.1
"""seconds between a completed save and the kill: a few saves take as long"""


def large_state(step: int) -> dict[str, Tensor]:
    return {f"model.{i}": torch.full((128, 256), float(step + i)) for i in range(6)}


def values_are_of_its_step(found: IntactCheckpoint) -> bool:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in large_state(0).items()}
    load_state(found.path, found.manifest, loaded, None)
    expected = large_state(found.manifest.step)
    return all(torch.equal(loaded[name], expected[name]) for name in expected)


def save_for_ever(folder: Path, acknowledged: Path, mode: str) -> None:
    """Go on from the newest checkpoint; write down each step once its save is complete."""
    torch.set_num_threads(1)
    store = open_store(folder, mode)
    found = store.latest()
    state, step = large_state(0), found.manifest.step if found else 0
    with acknowledged.open("a") as log:
        while True:
            step += 1
            for name, tensor in large_state(step).items():
                state[name].copy_(tensor)
            store.save(state, SaveInfo(step=step))
            store.wait_staged()
            for tensor in state.values():
                tensor.fill_(-1)
            store.finish()
            log.write(f"{step}\n")
            log.flush()


def acknowledged_steps(log: Path) -> list[int]:
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return [int(line) for line in lines]


def test_no_kill_leaves_a_torn_checkpoint_or_loses_one(tmp_path: Path) -> None:
    """Each kill waits until the saver has completed a save, however busy the machine is."""
    folder, log = tmp_path / "checkpoints", tmp_path / "acknowledged"
    dice = random.Random(0)
    leftovers = 0
    for attempt in range(KILLS):
        mode = ["sync", "async"][attempt % 2]
        before = len(acknowledged_steps(log))
        process = CONTEXT.Process(target=save_for_ever, args=(folder, log, mode))
        process.start()
        while len(acknowledged_steps(log)) == before:
            assert process.is_alive()
            time.sleep(0.002)
        time.sleep(dice.uniform(0, LONGEST))
        process.kill()
        process.join()
        leftovers += sum(path.name.startswith(".") for path in folder.iterdir())
        found = find_checkpoint(folder)
        assert found.skipped == [], "a checkpoint is complete or absent"
        assert found.manifest.step >= max(acknowledged_steps(log)), "an acknowledged one was lost"
        assert values_are_of_its_step(found)
    assert leftovers > 0, "no kill came during a save: the test is void"
