"""How long a save keeps training from going on, and how fast checkpoints are read.

A stand-in for training (matrix products, then an update of the state in place) runs without saves,
with synchronous ones and with asynchronous ones in turns, so that all see the same load.

    python benchmarks/checkpoint.py --write
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
from torch import Tensor

from trainer.engine.checkpoint.find import find_checkpoint
from trainer.engine.checkpoint.manifest import SaveInfo, verify
from trainer.engine.checkpoint.reader import load_state
from trainer.engine.checkpoint.store import CheckpointStore

PROMISED = 0.10
"""blocked time of an asynchronous save as a share of a synchronous one's"""
TENSOR_BYTES = 2**24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=4, help="saves of each kind")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    state = training_state(arguments.gigabytes)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured = measure(state, Path(folder), arguments.rounds)
    measured["gigabytes"] = sum(tensor.nbytes for tensor in state.values()) / 1e9
    show(measured)
    if arguments.write:
        print(results.append("checkpoint", measured))


def training_state(gigabytes: float) -> dict[str, Tensor]:
    count = round(gigabytes * 1e9 / TENSOR_BYTES / 3)
    keys = ["model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq"]
    names = [key.format(f"layers.{layer}.weight") for layer in range(count) for key in keys]
    return {name: torch.randn(TENSOR_BYTES // 4096, 1024) for name in names}


class Training:
    """Steps whose forward and backward take the time of some matrix products."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self.factor = torch.randn(1024, 1024)
        self.products = 1
        self.products = max(1, round(1.0 / timed(self.forward_and_backward)))

    def forward_and_backward(self) -> None:
        for _ in range(self.products):
            torch.mm(self.factor, self.factor)

    def update(self) -> None:
        for tensor in self.state.values():
            tensor.mul_(0.999)


def measure(state: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, Any]:
    training = Training(state)
    sync = CheckpointStore(folder / "sync", mode="sync", keep=1, group=None)
    background = CheckpointStore(folder / "async", mode="async", keep=1, group=None)
    for store in (sync, background):
        store.probe()
    seconds: dict[str, list[float]] = {
        key: [] for key in ("sync", "call", "wait", "in_flight", "step", "step_in_flight", "copy")
    }
    for step in range(rounds + 1):
        info = SaveInfo(step=step)
        seconds["step"].append(timed(training.forward_and_backward))
        seconds["sync"].append(timed(lambda info=info: sync.save(state, info)))
        start = time.perf_counter()
        seconds["call"].append(timed(lambda info=info: background.save(state, info)))
        seconds["step_in_flight"].append(timed(training.forward_and_backward))
        seconds["wait"].append(timed(background.wait_staged))
        training.update()
        background.finish()
        seconds["in_flight"].append(time.perf_counter() - start)
    for step in range(rounds + 1, 2 * rounds + 2):  # nothing to hide the copy behind
        background.save(state, SaveInfo(step=step))
        seconds["copy"].append(timed(background.wait_staged))
        background.finish()
    blocked = [call + wait for call, wait in zip(seconds["call"], seconds["wait"], strict=True)]
    checkpoint = find_checkpoint(folder / "async")
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
    return {
        "sync_seconds": later(seconds["sync"]),
        "blocked_seconds_first": blocked[0],
        "blocked_seconds": later(blocked),
        "copy_seconds": later(seconds["copy"]),
        "in_flight_seconds": later(seconds["in_flight"]),
        "step_seconds": later(seconds["step"]),
        "step_seconds_in_flight": later(seconds["step_in_flight"]),
        "verify_seconds": timed(lambda: verify(checkpoint.path)),
        "load_seconds": timed(
            lambda: load_state(checkpoint.path, checkpoint.manifest, loaded, None)
        ),
    }


def later(values: list[float]) -> float:
    """Return the median without the first, which imports and touches memory for the first time."""
    return statistics.median(values[1:])


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def show(measured: dict[str, Any]) -> None:
    size = measured["gigabytes"]
    share = measured["blocked_seconds"] / measured["sync_seconds"]
    rows = [
        ["synchronous save", f"{measured['sync_seconds']:.2f} s"],
        ["asynchronous save, blocked", f"{measured['blocked_seconds']:.3f} s"],
        ["  as a share of synchronous", f"{share:.1%} (promised {PROMISED:.0%})"],
        ["  the first one", f"{measured['blocked_seconds_first']:.3f} s"],
        ["  with no computation to hide behind", f"{measured['copy_seconds']:.2f} s"],
        ["  until it is published", f"{measured['in_flight_seconds']:.2f} s"],
        ["forward and backward alone", f"{measured['step_seconds']:.2f} s"],
        ["  while a save is in flight", f"{measured['step_seconds_in_flight']:.2f} s"],
        ["verify every byte", f"{size / measured['verify_seconds']:.2f} GB/s"],
        ["load", f"{size / measured['load_seconds']:.2f} GB/s"],
    ]
    print(results.table([f"state of {size:.2f} GB", ""], rows))


if __name__ == "__main__":
    main()
