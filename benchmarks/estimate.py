"""Memory estimates: what they cost, and how near they come to peaks that others published.

Published peaks are those that torchtitan reports (arXiv:2410.06511; its documentation's
"performance" page): memory that the allocator reserved, of 80 or 96 GB H100s. Its loss holds all
logits, in fp32; ours computes them in chunks. So each plan is estimated as it is, and with a loss
like theirs.

    python benchmarks/estimate.py --write
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import results

GIB = 2**30
ALLOWED_CPU_SECONDS, ALLOWED_GIB = 60, 8
TRAINER = (sys.executable, "-P", "-m", "trainer")
PR_SET_CHILD_SUBREAPER = 36
VOCABULARY = 128_256
RECIPE = """
[run]
steps = 100
[model]
name = "llama3"
flavor = "{flavor}"
[data]
seq_len = 8192
global_batch = {batch}
micro_batch = {micro}
[[data.sources]]
name = "synthetic"
[parallel]
{parallel}
[memory]
recompute = "{recompute}"
"""
COSTS: dict[str, tuple[int, dict[str, Any]]] = {
    "405B on 1,024, 8 micro batches": (
        1024,
        {"flavor": "405b", "batch": 128, "micro": 1, "parallel": "pipeline = 8\ntensor = 8"},
    ),
    "405B on 1,024, 16 micro batches": (
        1024,
        {"flavor": "405b", "batch": 256, "micro": 1, "parallel": "pipeline = 8\ntensor = 8"},
    ),
    "70B on 256": (256, {"flavor": "70b", "batch": 512, "micro": 16, "parallel": "tensor = 8"}),
    "8B on 8": (8, {"flavor": "8b", "batch": 16, "micro": 2, "parallel": ""}),
}
THEIRS = '["half_mm", "attention", "reduce_scatter"]'
PUBLISHED: dict[str, tuple[float, int, dict[str, Any], str]] = {
    "8B on 8, FSDP, batch 2": (82.4, 8, COSTS["8B on 8"][1], THEIRS),
    "8B on 128, FSDP, batch 2": (67.0, 128, {**COSTS["8B on 8"][1], "batch": 256}, THEIRS),
    "70B on 256, FSDP 32 x TP 8, batch 16, float8": (71.9, 256, COSTS["70B on 256"][1], ""),
}
"""name -> GiB, ranks, recipe, and what selective recomputation keeps"""
OUTSIDE = ("CUDA context", "NCCL")
"""margins that torch's allocator, whose peak they report, does not see"""


def simulated_peak(file: Path, world: int, whose: str, changes: Sequence[str]) -> dict[str, float]:
    """Return GiB of tensors and of what torch reserves, in a process that simulates one rank."""
    from trainer.engine.estimate.devices import overhead
    from trainer.engine.estimate.simulate import build
    from trainer.engine.estimate.simulate.extrapolate import simulate_memory
    from trainer.engine.recipe.load import load_recipe

    recipe = load_recipe(file, list(changes), world).recipe
    if whose == "theirs":
        splits_vocabulary = recipe.parallel.tensor > 1
        build.with_gpu_kernels = partial(with_whole_logits, splits_vocabulary)
    found = simulate_memory(recipe, 0, world, VOCABULARY, on_gpu=True)
    more = overhead(found.peak_bytes, 0, found.block_bytes, "h100")
    inside = sum(size for name, size in more.items() if name not in OUTSIDE)
    return {"tensors": found.peak_bytes / GIB, "reserved": (found.peak_bytes + inside) / GIB}


def with_whole_logits(splits_vocabulary: bool, built: Any) -> Any:
    """Return a model whose loss holds what torchtitan's does."""
    import torch
    import torch.nn.functional as F

    from trainer.engine.estimate.simulate.build import with_gpu_kernels

    class SplitCrossEntropy(torch.autograd.Function):
        """The steps of torch.distributed.tensor.parallel.loss_parallel, without its sums."""

        @staticmethod
        def forward(ctx: Any, logits: Any, labels: Any) -> Any:
            shifted = logits - logits.amax(-1, keepdim=True)
            found = shifted - shifted.exp().sum(-1, keepdim=True).log()
            ctx.save_for_backward(found, labels)
            return found.gather(1, labels.unsqueeze(1)).sum()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            found, labels = ctx.saved_tensors
            chosen = torch.zeros_like(found).scatter_(1, labels.unsqueeze(1), -1.0)
            return (chosen + found.exp()) * grad, None

    def loss(hidden: Any, weight: Any, labels: Any, **_: Any) -> Any:
        logits = F.linear(hidden, weight.to(hidden.dtype)).float()
        if splits_vocabulary:
            return SplitCrossEntropy.apply(logits, labels)
        return F.cross_entropy(logits, labels, reduction="sum")

    built = with_gpu_kernels(built)
    return replace(built, kernels=replace(built.kernels, linear_cross_entropy=loss))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("costs", "published"))
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    content: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "published":
            content["costs"] = [cost(Path(folder), name) for name in COSTS]
            print(show_costs(content["costs"]))
        if options.only != "costs":
            content["published"] = [compare(Path(folder), name) for name in PUBLISHED]
            print(show_published(content["published"]))
    if options.write:
        print(f"written to {results.append('estimate', content).name}")


def recipe_file(folder: Path, values: dict[str, Any], recompute: str) -> Path:
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(**values, recompute=recompute))
    return file


def cost(folder: Path, name: str) -> dict[str, Any]:
    """Run the command; its processes' CPU seconds are added up, grandchildren included."""
    world, values = COSTS[name]
    # Orphans, such as the process that others are forked from, become this process's children.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*TRAINER, "estimate-memory", str(recipe_file(folder, values, "full"))]
    done = subprocess.run(
        [*command, "--world", str(world), "--json"], capture_output=True, text=True, check=True
    )
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ranks = json.loads(done.stdout)["ranks"]
    return {
        "name": name,
        "cpu_s": round(cpu, 1),
        "largest_process_gib": round(after.ru_maxrss * 1024 / GIB, 2),
        "peak_gib": round(max(each["peak_bytes"] for each in ranks) / GIB, 2),
    }


def compare(folder: Path, name: str) -> dict[str, Any]:
    """Estimate a published plan, as it is here and with a loss like theirs."""
    published, world, values, keep = PUBLISHED[name]
    file = recipe_file(folder, values, "selective" if keep else "full")
    changes = [f"memory.recompute_keep={keep}"] if keep else []

    def peak(whose: str) -> dict[str, float]:
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            found = alone.submit(simulated_peak, file, world, whose, changes).result()
        return {kind: round(size, 1) for kind, size in found.items()}

    ours, theirs = peak("ours"), peak("theirs")
    return {
        "name": name,
        "published_gib": published,
        "ours_gib": ours,
        "with_their_loss_gib": theirs,
        "ratio": round(theirs["reserved"] / published, 3),
    }


def show_costs(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        [
            each["name"],
            f"{each['cpu_s']:.1f}",
            str(ALLOWED_CPU_SECONDS),
            f"{each['largest_process_gib']:.2f}",
            str(ALLOWED_GIB),
            f"{each['peak_gib']:.2f}",
        ]
        for each in rows
    ]
    heads = ["", "CPU s", "goal", "largest process GiB", "goal", "peak GiB"]
    return results.table(heads, lines)


def show_published(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        [
            each["name"],
            f"{each['published_gib']:.1f}",
            f"{each['with_their_loss_gib']['reserved']:.1f}",
            f"{each['ratio']:.2f}",
            f"{each['with_their_loss_gib']['tensors']:.1f}",
            f"{each['ours_gib']['reserved']:.1f}",
        ]
        for each in rows
    ]
    heads = ["", "published GiB", "estimate", "ratio", "tensors alone", "with our loss"]
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
