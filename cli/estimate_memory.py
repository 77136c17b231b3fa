"""`trainer estimate-memory`: peak memory of a run's ranks, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.core.errors import RecipeError, nearest
from .complete import complete_gpu
from .options import AsJson, Overrides, Recipe
from .table import print_table

if TYPE_CHECKING:
    from ..engine.estimate.memory import Estimate, Suggestion

GIB = 2**30
KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "logits and loss",
    "temporary",
)
MONITORS = "monitors"  # few recipes have any that hold memory
SHOWN_KNOBS = 5


def estimate_memory(
    recipe: Recipe,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option(min=1, max=2**20, help="ranks")] = 1,
    gpu: Annotated[
        str,
        typer.Option(autocompletion=complete_gpu, help="say whether it fits, such as h100 or h200"),
    ] = "",
    knobs: Annotated[bool, typer.Option(help="say what would save most, also if it fits")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="as computed on this machine's CPU")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the peak memory of every rank that differs, by what holds it; no GPU is needed.

    The step that would train is run without numbers, so that shapes alone are computed. What CUDA,
    NCCL and the allocator hold besides tensors is added from published figures. Where a plan does
    not fit a GPU, it also says which changes would save most.
    """
    from ..engine.estimate.devices import GPU_MIB
    from ..engine.estimate.memory import describe_row_lengths, estimate_memory
    from ..engine.recipe.load import load_recipe

    if gpu and gpu not in GPU_MIB:
        raise RecipeError(
            f"--gpu {gpu}: not known", nearest(gpu, GPU_MIB) or f"known: {', '.join(GPU_MIB)}"
        )
    if cpu and (gpu or knobs):
        raise RecipeError(f"{'--gpu' if gpu else '--knobs'} with --cpu", "give one of the two")
    given = overrides or []
    loaded = load_recipe(recipe, given, world).recipe
    estimates = estimate_memory(loaded, world, on_gpu=not cpu, gpu=gpu or "h100")
    memory = GPU_MIB[gpu] * 2**20 if gpu else None
    left = None if memory is None else memory - max(each.total_bytes for each in estimates)
    best: list[Suggestion] | None = None
    if knobs or (left is not None and left < 0):
        from ..engine.estimate.memory import suggest

        def load(changes: Sequence[str], ranks: int) -> Any:
            return load_recipe(recipe, [*given, *changes], ranks).recipe

        best = suggest(loaded, estimates, world, load)
    row_lengths = describe_row_lengths(loaded)
    if as_json:
        content = {**_as_json(estimates, gpu, left, best), "row_lengths": row_lengths}
        print(json.dumps(content, indent=1))
        return
    _print(estimates)
    if row_lengths:
        print(row_lengths)
    if memory is not None and left is not None:
        print(_verdict(gpu, memory, left))
    if best is not None:
        _print_knobs(best, world)


def _as_json(
    estimates: Sequence[Estimate], gpu: str, left: int | None, best: Sequence[Suggestion] | None
) -> dict[str, Any]:
    content: dict[str, Any] = {"ranks": [each.as_json() for each in estimates]}
    if left is not None:
        content |= {"gpu": gpu, "left_bytes": left}
    if best is not None:
        content["knobs"] = [asdict(each) for each in best]
    return content


def _print(estimates: Sequence[Estimate]) -> None:
    heads = ["", *(f"rank {each.rank}" for each in estimates)]
    rows = [heads]
    measured = any(each.at_peak.get(MONITORS) for each in estimates)
    kinds = (*KINDS, MONITORS) if measured else KINDS
    for kind in kinds:
        rows.append([kind, *(_size(each.at_peak.get(kind, 0)) for each in estimates)])
    named = [sum(each.at_peak.get(kind, 0) for kind in kinds) for each in estimates]
    others = [_size(each.peak_bytes - n) for each, n in zip(estimates, named, strict=True)]
    rows.append(["other", *others])
    rows.append(["tensors at the peak", *(_size(each.peak_bytes) for each in estimates)])
    for name in dict.fromkeys(name for each in estimates for name in each.margins):
        rows.append([f"+ {name}", *(_size(each.margins.get(name, 0)) for each in estimates)])
    if any(each.margins for each in estimates):
        rows.append(["in all", *(_size(each.total_bytes) for each in estimates)])
    print_table(rows)


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _verdict(gpu: str, memory: int, left: int) -> str:
    if left < 0:
        return f"{gpu}: {_size(memory)}, {_size(-left)} too little"
    return f"{gpu}: {_size(memory)}, {_size(left)} left"


def _print_knobs(best: Sequence[Suggestion], world: int) -> None:
    if not best:
        print("no change that was tried saves memory")
        return
    print()
    rows = [["SAVES", "BY"]]
    for knob in best[:SHOWN_KNOBS]:
        changes = [f"--set {change}" for change in knob.changes]
        if knob.world != world:
            changes.insert(0, f"--world {knob.world}")
        rows.append([_size(knob.saved_bytes), " ".join(changes)])
    print_table(rows)
