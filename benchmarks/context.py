"""Ring attention beside gathered keys and values: time of forward and backward, bytes held.

Both take turns on the same ranks (gloo, one thread each), on the same queries, keys and values.
The ratio is that of CPU seconds over all ranks, the median of the rounds; wall seconds are the
slowest rank's.

    python benchmarks/context.py --write
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from trainer.engine.estimate.simulate.tracker import MemoryTracker
from trainer.engine.parallel.context.context import ContextParallel
from trainer.kernels.choose import choose

HEADS, GROUPS, WIDTH = 8, 2, 64
EXCHANGES = ("gather", "ring")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--seq-len", type=int, action="append", help="default: 1024 and 4096")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    rows = []
    for ranks in options.ranks or (2, 4):
        for length in options.seq_len or (1024, 4096):
            for documents in (False, True):
                rows.append(measure(ranks, length, documents, options.rounds))
    print(show(rows))
    if options.write:
        measured = {"heads": HEADS, "key_heads": GROUPS, "width": WIDTH, "rounds": options.rounds}
        print(f"written to {results.append('context', {**measured, 'rows': rows}).name}")


def measure(ranks: int, length: int, documents: bool, rounds: int) -> dict[str, Any]:
    """Return times and bytes of both exchanges, and their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure_rank, (ranks, folder, length, documents, rounds), nprocs=ranks)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    row: dict[str, Any] = {"ranks": ranks, "seq_len": length, "documents": documents}
    cpu, wall = (
        {
            name: [over(each[name][turn][kind] for each in found) for turn in range(rounds)]
            for name in EXCHANGES
        }
        for kind, over in (("cpu", sum), ("wall", max))
    )
    for kind, seconds in (("cpu", cpu), ("wall", wall)):
        pairs = zip(seconds["gather"], seconds["ring"], strict=True)
        row[f"{kind}_ratio"] = round(statistics.median(ring / gather for gather, ring in pairs), 3)
    row["cpu_ms_gather"] = round(1e3 * statistics.median(cpu["gather"]), 1)
    for name in EXCHANGES:
        row[f"peak_mib_{name}"] = round(max(each["peak"][name] for each in found) / 2**20, 2)
        row[f"kept_mib_{name}"] = round(max(each["kept"][name] for each in found) / 2**20, 2)
    return row


def measure_rank(
    rank: int, ranks: int, folder: str, length: int, with_documents: bool, rounds: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    inputs, direction = columns(rank, length // ranks)
    documents = (torch.arange(length) // (length // 4)).int().unsqueeze(0)
    steps = {}
    for name in EXCHANGES:
        context = ContextParallel(dist.group.WORLD, rank, ranks, in_ring=name == "ring")
        kernels = context.adapt_kernels(choose({"attention": "sdpa"}, "cpu", length), None)
        mask = kernels.attention_mask(documents, documents) if with_documents else None
        steps[name] = step_of(kernels.attention, inputs, direction, mask)
    found: dict[str, Any] = {name: [] for name in EXCHANGES}
    found["peak"] = {name: peak_bytes(step) for name, step in steps.items()}
    found["kept"] = {name: kept_bytes(step) for name, step in steps.items()}
    for turn in range(rounds):
        for name in EXCHANGES if turn % 2 else reversed(EXCHANGES):
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            steps[name]()
            found[name].append(
                {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
            )
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def columns(rank: int, length: int) -> tuple[list[Tensor], Tensor]:
    """Return a rank's query, key and value, and the gradient of its output."""
    torch.manual_seed(rank)
    q, k, v, direction = (
        torch.randn(1, length, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    return [each.requires_grad_() for each in (q, k, v)], direction


def step_of(
    attend: Callable[..., Tensor], inputs: list[Tensor], direction: Tensor, mask: Tensor | None
) -> Callable[[], None]:
    """Return a function that runs forward and backward."""

    def step() -> None:
        torch.autograd.grad(attend(*inputs, mask), inputs, direction)

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """Return the most bytes that a step's tensors hold at a moment, its inputs left out."""
    with MemoryTracker() as tracker:
        step()
    return tracker.peak().total


def kept_bytes(step: Callable[[], None]) -> int:
    """Return the bytes that the forward pass keeps for the backward pass."""
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step()
    return sum(kept.values())


def show(rows: list[dict[str, Any]]) -> str:
    heads = [
        "",
        "gather CPU ms",
        "ring / gather CPU",
        "wall",
        "peak MiB",
        "ring",
        "kept MiB",
        "ring",
    ]
    lines = [
        [
            f"{row['ranks']} ranks, {row['seq_len']}{', documents' * row['documents']}",
            f"{row['cpu_ms_gather']:.0f}",
            f"{row['cpu_ratio']:.2f}",
            f"{row['wall_ratio']:.2f}",
            f"{row['peak_mib_gather']:.1f}",
            f"{row['peak_mib_ring']:.1f}",
            f"{row['kept_mib_gather']:.1f}",
            f"{row['kept_mib_ring']:.1f}",
        ]
        for row in rows
    ]
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
