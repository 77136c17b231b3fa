"""Shrinks a recipe to what some processes of a CPU compute in seconds. Torch-free.

Sizes shrink, and the structure stays: which axes have several ranks, schedules, kinds of blocks,
accumulation, packing, adapters and the task.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import RecipeError
from ..core.text.tree import Finding
from ..parallel.mesh import AXES, EXPERT_AXES, Degrees
from ..parallel.pipeline.cut import num_micro_batches, num_stages
from ..parallel.tables import Parallel
from ..precision.choose import EXPERTS_UNIT, required_multiple
from ..recipe.checks.checks import check
from ..recipe.schema import Recipe
from .sizes import round_up, shrink_model

RANKS = 8
"""the ranks of a check, unless a plan has more axes than these can have"""
ROW, RECORD_ROW = 32, 64
"""tokens of a row, and of a row that is made of a record with fields"""
RULES = (("parallel", "rules"), ("parallel", "fsdp", "ignored"))
"""lists whose patterns may name blocks that the small model does not have"""


@dataclass(frozen=True)
class Shrunk:
    """A recipe as a check computes it.

    Attributes:
        recipe: the small recipe.
        degrees: its degrees; their product is the number of ranks.
        sizes: what the recipe says, and what the check takes, by key.
        notes: what the check leaves out.
    """

    recipe: Recipe
    degrees: Degrees
    sizes: dict[str, tuple[Any, Any]]
    notes: list[str]


def shrink(recipe: Recipe, world: int) -> Shrunk:
    """Return a small recipe of the same structure.

    Args:
        recipe: the recipe, which `adapt` has made one for a CPU.
        world: the world size of the recipe's plan.

    Raises:
        RecipeError: the degrees do not make the world size, or the structure does not fit a small
            model.
    """
    given = recipe.parallel.degrees.resolve(world)
    table = recipe.parallel.pipelining
    is_pinned = bool(table.csv or table.layers_per_stage or table.modules_per_stage)
    degrees = shrink_degrees(given, ("pipeline",) if is_pinned else ())
    unit = max(map(required_multiple, recipe.precision.low_precision.values()), default=1)
    length = round_up(RECORD_ROW if recipe.task.fields else ROW, degrees.sequence_pieces * unit)
    lengths = recipe.data.seq_len, min(length, recipe.data.seq_len)
    changes: dict[str, Any] = _shrink_rows(recipe, given, degrees, lengths[1], is_pinned)
    stages = 1
    if degrees.pipeline > 1:
        stages = num_stages(changes["parallel"].pipelining, degrees.pipeline)
    if is_pinned:
        stages = getattr(recipe.model, "n_layers", stages)
    unit = EXPERTS_UNIT if _multiplies_experts(recipe) else unit
    changes["model"] = shrink_model(
        recipe.model, given, degrees, lengths=lengths, stages=stages, unit=unit
    )
    rank = min(recipe.lora.rank, 4)
    changes["lora"] = recipe.lora.model_copy(update={"rank": rank})
    small = recipe.model_copy(update=changes)
    notes: list[str] = []
    for path in RULES:
        if any(found[0][: len(path)] == path for found in check(small, degrees.world)):
            small = _drop(small, path)
            notes.append(f"{'.'.join(path)}: names what the small model does not have")
    if findings := check(small, degrees.world):
        raise RecipeError(
            f"{_say(findings[0])}, in the small recipe that stands for this one",
            "its structure cannot be shrunk: give a recipe with other sizes",
        )
    return Shrunk(small, degrees, dict(_compare(recipe, small, given, degrees)), notes)


def shrink_degrees(given: Degrees, pinned: Collection[str] = ()) -> Degrees:
    """Return degrees of 2 for all axes of more ranks, and of more for the largest, up to `RANKS`.

    An odd degree up to `RANKS` stays, because sizes may divide by no other.

    Args:
        given: the degrees of a recipe.
        pinned: axes whose degrees stay.
    """
    small = {
        axis: degree if axis in pinned or (degree % 2 and degree < RANKS) else 2
        for axis, degree in given.by_axis.items()
        if degree > 1
    }
    found = Degrees(**{**dict.fromkeys(AXES, 1), **small})
    experts = {axis: min(2, getattr(given, axis)) for axis in EXPERT_AXES}
    held = experts["expert"] * experts["expert_tensor"]
    while True:
        stage = found.world // found.pipeline
        room = [
            axis
            for axis, degree in found.by_axis.items()
            if axis not in pinned and getattr(given, axis) % (2 * degree) == 0
            # Experts are shared by the ranks of a stage.
            if not (stage % held and axis == "pipeline")
        ]
        if not room or (2 * found.world > RANKS and stage % held == 0):
            break
        widest = max(room, key=lambda axis: getattr(given, axis) / getattr(found, axis))
        found = replace(found, **{widest: 2 * getattr(found, widest)})
    whole = given.expert_ranks == given.world // given.pipeline
    while (
        stage % (2 * held) == 0 and given.expert % (2 * experts["expert"]) == 0 and given.expert > 1
    ):
        # Ranks that each hold a share of the experts and no copy of another's, only where it is so.
        if 2 * held == stage and not whole:
            break
        experts["expert"], held = 2 * experts["expert"], 2 * held
    return replace(found, **experts)


def select_axes(recipe: Recipe, degrees: Degrees, axes: Collection[str]) -> Recipe | None:
    """Return a recipe with some of the axes alone, the others at 1; None: there is no such plan.

    Args:
        recipe: a small recipe.
        degrees: its degrees.
        axes: names of axes, of experts too.
    """
    kept = {axis: getattr(degrees, axis) if axis in axes else 1 for axis in (*AXES, *EXPERT_AXES)}
    found = Degrees(**kept)
    # Experts need ranks to be shared by, whose own axis is then checked alone too.
    missing = -(-found.expert_ranks // max(1, found.world // found.pipeline))
    if missing > 1:
        found = replace(found, shard=found.shard * missing)
    alone = _with_degrees(recipe, found)
    return None if check(alone, found.world) else alone


def on_one_process(recipe: Recipe) -> Recipe:
    """Return a recipe without a plan."""
    return recipe.model_copy(update={"parallel": Parallel(shard=1)})


def _with_degrees(recipe: Recipe, degrees: Degrees, **changes: Any) -> Recipe:
    values = {axis: getattr(degrees, axis) for axis in (*AXES, *EXPERT_AXES)}
    parallel = recipe.parallel.model_copy(update={**values, **changes})
    if degrees.replicate == 1 and (sharding := parallel.fsdp.sharding).needs_replicas:
        fsdp = parallel.fsdp.model_copy(update={"strategy": sharding.without_replicas})
        parallel = parallel.model_copy(update={"fsdp": fsdp})
    return recipe.model_copy(update={"parallel": parallel})


def _shrink_rows(
    recipe: Recipe, given: Degrees, degrees: Degrees, length: int, is_pinned: bool
) -> dict[str, Any]:
    """Return the tables of data and of parallelism: whether a step accumulates stays."""
    data, table, fsdp = recipe.data, recipe.parallel.pipelining, recipe.parallel.fsdp
    share = max(1, data.global_batch // given.data)
    micro = min(data.micro_batch, share, 2)
    pieces = 1 if share <= data.micro_batch else 2
    if degrees.pipeline > 1:
        count = num_micro_batches(table, data.micro_batch, share)
        pieces = 2 * degrees.pipeline if count >= given.pipeline else 1
        pieces = count if is_pinned else pieces
        table = table.model_copy(
            update={
                "micro_batches": table.micro_batches and pieces,
                "stages_per_rank": table.stages_per_rank and min(2, table.stages_per_rank),
                "cost": "estimated",  # times would differ from run to run
            }
        )
    resharded = fsdp.reshard_after_forward and 2 * (degrees.fsdp % 2 == 0)
    fsdp = fsdp.model_copy(update={"reshard_after_forward": resharded})
    rows = {
        "seq_len": length,
        "micro_batch": micro,
        "global_batch": micro * pieces * degrees.data,
        "pad_to": min(data.pad_to, 8),
    }
    parallel = _with_degrees(recipe, degrees, pipelining=table, fsdp=fsdp).parallel
    return {"data": data.model_copy(update=rows), "parallel": parallel}


def _multiplies_experts(recipe: Recipe) -> bool:
    """Return whether experts may multiply in float8, whose blocks are wide."""
    return recipe.precision.float8.enabled and bool(getattr(recipe.model, "moe", None))


def _drop(recipe: Recipe, path: tuple[str, ...]) -> Recipe:
    parallel = recipe.parallel
    changes: dict[str, Any] = {"rules": []}
    if "fsdp" in path:
        changes = {"fsdp": parallel.fsdp.model_copy(update={"ignored": []})}
    return recipe.model_copy(update={"parallel": parallel.model_copy(update=changes)})


def _say(finding: Finding) -> str:
    return f"{'.'.join(map(str, finding[0]))}: {finding[1]}"


def _compare(
    recipe: Recipe, small: Recipe, given: Degrees, degrees: Degrees
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each key whose value has shrunk, with both values."""
    for axis in (*AXES, *EXPERT_AXES):
        before, after = getattr(given, axis), getattr(degrees, axis)
        if before != after:
            yield f"parallel.{axis}", (before, after)
    for name in ("model", "data", "lora"):
        before, after = (getattr(one, name).model_dump() for one in (recipe, small))
        yield from _differences(before, after, name)
    before, after = (one.parallel.pipelining.model_dump() for one in (recipe, small))
    yield from _differences(before, after, "parallel.pipelining")


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], name: str
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, value in before.items():
        if isinstance(value, dict) and isinstance(after[key], dict):
            yield from _differences(value, after[key], f"{name}.{key}")
        elif value != after[key]:
            yield f"{name}.{key}", (value, after[key])
