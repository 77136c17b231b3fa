"""Small states whose values say which step they are of."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from trainer.engine.checkpoint.find import Found
from trainer.engine.checkpoint.manifest import SaveInfo
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.checkpoint.store import CheckpointStore

SHAPES = {
    "model.embedding": (7, 3),
    "model.short": (2, 5),
    "model.bias": (6,),
    "optimizer.embedding.exp_avg": (7, 3),
    "optimizer.embedding.step": (),
}


def state_of(step: int) -> dict[str, Tensor]:
    """Return a state that depends on the step alone, with a bf16 tensor in it."""
    generator = torch.Generator().manual_seed(step)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return state | {"model.half": torch.randn(4, 4, generator=generator).bfloat16()}


def blank() -> dict[str, Tensor]:
    """Return a state to load into, with values no step has."""
    return {name: torch.full_like(tensor, -1) for name, tensor in state_of(0).items()}


def differing(found: Found, step: int) -> list[str]:
    """Load a checkpoint and return the names whose values are not those of the step."""
    loaded = blank()
    load_state(found.path, found.manifest, loaded, None)
    return [
        name for name, tensor in state_of(step).items() if not torch.equal(tensor, loaded[name])
    ]


def open_store(folder: Path, mode: str = "sync", keep: int = 2) -> CheckpointStore:
    """Return the store of one process, ready."""
    store = CheckpointStore(folder, mode=mode, keep=keep, group=None)
    store.probe()
    return store


def save_steps(folder: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    """Save the states of some steps."""
    store = open_store(folder, keep=keep)
    for step in steps:
        store.save(state_of(step), SaveInfo(step=step, samples=step * 8))
    return store
