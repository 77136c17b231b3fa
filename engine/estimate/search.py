"""Searches for the fastest way to split a run, by the roofline estimate of a step's time.

The best plans are then simulated to find their real peak memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from math import prod

from ..core.errors import RecipeError
from ..parallel.mesh import DATA_AXES, MESH, Degrees
from ..recipe.checks.checks import check
from ..recipe.schema import Recipe
from .devices import DEVICES
from .memory import estimate_memory
from .roofline import Candidate, estimate
from .step_sizes import StepSizes

USABLE = 0.9
"""share of a GPU's memory for tensors; CUDA, NCCL and the allocator use the rest"""
MICRO_BATCHES = (1, 2, 4, 8)
SIMULATED, MOST_SIMULATED = 3, 8
"""plans are simulated until this many fit, but no more than the second number"""


def search(
    recipe: Recipe, ranks: int, gpu: str, memory_bytes: int, gpus_per_node: int
) -> list[Candidate]:
    """Return the plans that fit a GPU, the fastest first. Up to three were checked by simulation.

    The degrees, the recomputation (none or full) and the micro batch vary. All other keys are the
    recipe's, except that a hybrid FSDP strategy becomes the plain one where there is one replica.

    Args:
        recipe: a valid recipe; its own degrees do not matter.
        ranks: the world size.
        gpu: a key of `DEVICES`.
        memory_bytes: the memory of that GPU.
        gpus_per_node: the number of ranks in a node.

    Raises:
        RecipeError: no plan is valid, or none fits the memory; or a split has a micro batch of its
            own; or the model is a module of a plugin.
    """
    if not recipe.task.needs_language_model:
        message = "the search estimates speeds from the sizes of a language model of the zoo, and "
        raise RecipeError(f'{message}the task "{recipe.task.name}" trains a module of a plugin')
    if any(split.micro_batch for split in recipe.data.splits):
        message = "a training split has a micro_batch of its own, and the search looks for one"
        raise RecipeError(message, "leave micro_batch out of data.splits")
    sizes = StepSizes.of(recipe)
    candidates = [
        estimate(variant, degrees, sizes, DEVICES[gpu], gpus_per_node)
        for variant, degrees in variants(recipe, ranks, gpus_per_node)
    ]
    if not candidates:
        raise RecipeError(f"no plan of {ranks} ranks is valid for this recipe")
    fitting = [one for one in candidates if one.memory_bytes <= USABLE * memory_bytes]
    if not fitting:
        least = min(one.memory_bytes for one in candidates) / 2**30
        message = f"no plan of {ranks} ranks fits {gpu}: the least takes {least:.1f} GiB a rank"
        raise RecipeError(message, "more ranks, a shorter data.seq_len, or parallel.fsdp.offload")
    fitting.sort(key=lambda one: (one.seconds, one.memory_bytes))
    best: list[Candidate] = []
    others = iter(fitting)
    for candidate in islice(others, MOST_SIMULATED):
        split = apply_plan(recipe, candidate.degrees, candidate.recompute, candidate.micro_batch)
        peaks = estimate_memory(split, ranks, gpu=gpu)
        worst = max(peaks, key=lambda one: one.total_bytes)
        if worst.total_bytes <= memory_bytes:
            best.append(replace(candidate, simulated_bytes=worst.peak_bytes))
        if len(best) == SIMULATED:
            break
    if not best:
        message = f"of {ranks} ranks no plan fits {gpu} that was simulated"
        raise RecipeError(message, "more ranks, a shorter data.seq_len, or parallel.fsdp.offload")
    return [*best, *others]


def variants(recipe: Recipe, ranks: int, gpus_per_node: int) -> Iterator[tuple[Recipe, Degrees]]:
    """Yield the recipe under each plan that validation accepts, with the plan's degrees."""
    data = recipe.data.largest
    rows = {min(data.micro_batch, data.global_batch), *MICRO_BATCHES}
    for degrees in _factorings(ranks, gpus_per_node):
        if any(
            getattr(degrees, axis.name) > max(1, data.seq_len // axis.least_positions)
            for axis in MESH
            if axis.least_positions
        ):
            continue
        # One check rules out invalid degrees before the loop over recomputation and micro batches.
        once = apply_plan(recipe, degrees, "none", 1)
        if any(True for _ in check(once, ranks)):
            continue
        share = data.global_batch // degrees.data
        for recompute, micro_batch in product(("none", "full"), sorted(rows)):
            if micro_batch <= share:
                variant = apply_plan(recipe, degrees, recompute, micro_batch)
                if not any(True for _ in check(variant, ranks)):
                    yield variant, degrees


def apply_plan(recipe: Recipe, degrees: Degrees, recompute: str, micro_batch: int) -> Recipe:
    """Return the recipe with other degrees, recomputation and micro batch."""
    parallel, fsdp = recipe.parallel, recipe.parallel.fsdp
    free = {"micro_batches": 0, "layers_per_stage": [], "modules_per_stage": [], "csv": ""}
    if degrees.replicate == 1:
        strategy = fsdp.sharding.without_replicas or fsdp.strategy
        fsdp = fsdp.model_copy(update={"strategy": strategy})
    tables = {"pipelining": parallel.pipelining.model_copy(update=free), "fsdp": fsdp}
    return recipe.model_copy(
        update={
            "parallel": parallel.model_copy(update={**degrees.by_axis, **tables}),
            "memory": recipe.memory.model_copy(update={"recompute": recompute}),
            "data": recipe.data.model_copy(update={"micro_batch": micro_batch}),
        }
    )


def _factorings(ranks: int, gpus_per_node: int) -> Iterator[Degrees]:
    """Yield the degrees whose product is the world size."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    inner = [axis for axis in MESH if axis.name not in DATA_AXES]
    for sizes in product(divisors, repeat=len(inner)):
        too_wide = any(
            size > gpus_per_node and axis.inside_nodes
            for axis, size in zip(inner, sizes, strict=True)
        )
        if too_wide or ranks % prod(sizes):
            continue
        data = ranks // prod(sizes)
        for replicate in divisors:
            # Replicas are worth it between nodes: inside, sharding costs as little.
            if data % replicate == 0 and (replicate == 1 or data // replicate >= gpus_per_node):
                given = {axis.name: size for axis, size in zip(inner, sizes, strict=True)}
                yield Degrees(**given, replicate=replicate, shard=data // replicate)
