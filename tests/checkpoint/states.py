"""Small states whose values say which step they are of."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor

from trainer.engine.checkpoint.find import IntactCheckpoint
from trainer.engine.checkpoint.manifest import SaveInfo, read_manifest
from trainer.engine.checkpoint.reader import load_state, read_tensors
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


def differing(found: IntactCheckpoint, step: int) -> list[str]:
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


def seal(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> None:
    """Write a manifest whose checksums agree with the files as they are now."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes())["manifest"]
    for file in folder.iterdir():
        if file.name != "manifest.json":
            content = file.read_bytes()
            manifest["files"][file.name] = {
                "bytes": len(content),
                "xxh3": xxhash.xxh3_128_hexdigest(content),
            }
    if change:
        change(manifest)
    body = f'"manifest": {json.dumps(manifest)}}}\n'.encode()
    path.write_bytes(b'{"xxh3": "%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body)


def rewrite_as_format_1(folder: Path) -> None:
    """Replace a checkpoint's safetensors files and index by torch DCP files, as they once were."""
    manifest = read_manifest(folder)
    state = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in manifest.tensors.items()
    }
    read_tensors(folder, manifest, state)
    old = [name for name in manifest.files if name.endswith((".safetensors", "index.json"))]
    for name in old:
        (folder / name).unlink()
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)

    def change(content: dict[str, Any]) -> None:
        content["format"] = 1
        for name in old:
            del content["files"][name]

    seal(folder, change)
