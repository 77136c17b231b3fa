"""`trainer estimate-memory`: peak memory of a run's ranks, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import RecipeError, nearest
from .options import AsJson, Overrides, Recipe
from .table import print_table

if TYPE_CHECKING:
    from ..engine.estimate.simulate import Simulation

GIB = 2**30
KINDS = (
    "parameters",
    "optimizer",
    "gathered weights",
    "activations",
    "logits and loss",
    "backward",
)


def estimate_memory(
    recipe: Recipe,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option(min=1, max=2**20, help="ranks")] = 1,
    gpu: Annotated[str, typer.Option(help="say whether it fits, such as h100 or h200")] = "",
    cpu: Annotated[bool, typer.Option("--cpu", help="as computed on this machine's CPU")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the peak memory of every rank that differs, by what holds it; no GPU is needed.

    The step that would train is run without numbers, so that shapes alone are computed. Not
    counted: what CUDA, NCCL and the allocator hold besides tensors.
    """
    from ..engine.estimate.memory import GPU_MIB, estimate_memory
    from ..engine.recipe.load import load_recipe

    if gpu and gpu not in GPU_MIB:
        raise RecipeError(
            f"--gpu {gpu}: not known", nearest(gpu, GPU_MIB) or f"known: {', '.join(GPU_MIB)}"
        )
    if gpu and cpu:
        raise RecipeError("--gpu with --cpu", "give one of the two")
    loaded = load_recipe(recipe, overrides or [], world).recipe
    found = estimate_memory(loaded, world, on_gpu=not cpu)
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=1))
        return
    _print(found)
    if gpu:
        print(_margin(max(each.peak_bytes for each in found), gpu, GPU_MIB[gpu] * 2**20))


def _print(found: Sequence[Simulation]) -> None:
    rows = [["RANK", "PEAK", *(kind.upper() for kind in KINDS), "OTHER"]]
    for each in found:
        sizes = [each.at_peak.get(kind, 0) for kind in KINDS]
        sizes.append(each.peak_bytes - sum(sizes))
        rows.append([str(each.rank), *map(_size, (each.peak_bytes, *sizes))])
    print_table(rows)


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _margin(peak: int, gpu: str, memory: int) -> str:
    left = (memory - peak) / GIB
    if left < 0:
        return f"{gpu}: {memory / GIB:.1f} GiB, {-left:.1f} GiB too little"
    return f"{gpu}: {memory / GIB:.1f} GiB, {left:.1f} left for CUDA, NCCL and the allocator"
