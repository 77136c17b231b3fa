"""Compares a recipe's plan with one process: routing, losses, and the gradient of each parameter.

Torch-free: the processes of `workers` compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, sqrt

from ..core.errors import RecipeError
from ..parallel.mesh import AXES, EXPERT_AXES, Degrees
from ..recipe.schema import Recipe
from .adapt import adapt, in_float64
from .jobs import COMPUTE, Distance, PlanJob, StepDistances
from .shrink import RANKS, Shrunk, on_one_process, select_axes, shrink
from .workers import RankPool

LIMIT = 1e-9
"""largest relative difference in float64"""
FACTOR = 2.0
"""how many times as far from float64 as one process a plan may be in low precision"""
STEPS = 2


@dataclass(frozen=True)
class Difference:
    """What a plan computes differently.

    Attributes:
        step: number of the first step that differs, from 1.
        what: "routing", "loss" or "gradient".
        name: the router, or the first parameter whose gradient differs, in the model's order.
        size: the relative difference; of low precision, the distance from float64.
        axes: the axes that bring it, the fewest that do; empty: no part of the plan does alone.
    """

    step: int
    what: str
    name: str
    size: float
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        shrunk: the recipe as it was checked.
        notes: what was replaced or left out.
        loss: the largest relative difference of a loss.
        gradient: the largest relative difference of a gradient; with `alone`, the distance of all
            gradients from float64.
        worst: the parameter whose gradient differs most.
        parameters: how many parameters were compared.
        layers: how many layers of experts were compared.
        alone: the distance of one process from float64; None: the comparison was in float64.
        difference: the first difference over the limit; None: there is none.
    """

    shrunk: Shrunk
    notes: list[str]
    loss: float
    gradient: float
    worst: str
    parameters: int
    layers: int
    alone: float | None = None
    difference: Difference | None = None


def find_world(recipe: Recipe, load: Callable[[int], Recipe]) -> tuple[Recipe, int]:
    """Return a recipe and a world size that its plan fits, where none is given.

    Args:
        recipe: a recipe, validated for no world size.
        load: returns the recipe, validated for a world size.

    Raises:
        RecipeError: the recipe fits none of the sizes that were tried.
    """
    degrees = recipe.parallel.degrees
    fixed = degrees.known.world
    if degrees.is_known(*AXES):
        return load(fixed), fixed
    sizes = [fixed * left for left in (8, 4, 2) if fixed * left <= max(RANKS, 2 * fixed)]
    for size in sizes[:-1]:
        try:
            return load(size), size
        except RecipeError:
            continue
    return load(sizes[-1]), sizes[-1]


def check_plan(
    recipe: Recipe,
    world: int,
    pool: RankPool,
    *,
    as_is: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Compare a plan with one process on the same batches.

    Args:
        recipe: the recipe, validated for that world size.
        world: the world size.
        pool: the processes that compute.
        as_is: compare in the recipe's own precision: how far the plan is from float64, and how far
            one process is.
        say: is told what is computed next.

    Raises:
        RecipeError: the recipe's structure cannot be shrunk.
        TrainerError: a rank failed.
    """
    adapted, notes = adapt(recipe, pool.folder, as_is=as_is)
    shrunk = shrink(adapted, world)
    small, degrees = shrunk.recipe, shrunk.degrees
    single = on_one_process(small)
    # Of a conversation not every token counts.
    hides = any(source.name == "chat" for source in recipe.data.all_sources)
    job = PlanJob(small, str(pool.folder / "reference.npz"), steps=STEPS, hides_labels=hides)

    def measure(recipe: Recipe, ranks: int, writes: bool = False) -> list[StepDistances]:
        found = pool.run(ranks, COMPUTE, job._replace(recipe=recipe, writes=writes))
        return [merge(steps) for steps in zip(*found, strict=True)]

    say("one process")
    reference = measure(in_float64(single), 1, writes=True)
    alone = measure(single, 1) if as_is else None
    say(f"{degrees.world} ranks")
    steps = measure(small, degrees.world)
    found = find_difference(reference, steps, alone)
    for axes in choose_axes(degrees) if found else ():
        part = select_axes(small, degrees, axes)
        if part is not None:
            say(f"{' and '.join(axes)} alone")
            partial = measure(part, part.parallel.degrees.world)
            if found and find_difference(reference, partial, alone):
                found = replace(found, axes=axes)
                break
    return _describe(shrunk, [*notes, *shrunk.notes], steps, alone, found)


def merge(ranks: Sequence[StepDistances]) -> StepDistances:
    """Return the distances of a step over all ranks: the largest one of each parameter."""
    gradients: dict[str, Distance] = {}
    for rank in ranks:
        for name, distance in rank.gradients.items():
            gradients[name] = max(gradients.get(name, distance), distance)
    routing = [name for rank in ranks for name in rank.routing]
    loss = max(rank.loss for rank in ranks)
    return StepDistances(ranks[0].layers, routing, loss, gradients)


def choose_axes(degrees: Degrees) -> Iterator[tuple[str, ...]]:
    """Yield the axes with several ranks, one at a time, and then in pairs."""
    present = [axis for axis in (*AXES, *EXPERT_AXES) if getattr(degrees, axis) > 1]
    for count in (1, 2):
        yield from combinations(present, count)


def find_difference(
    reference: Sequence[StepDistances],
    steps: Sequence[StepDistances],
    alone: Sequence[StepDistances] | None = None,
) -> Difference | None:
    """Return the first difference over the limit, in the order in which a step computes.

    Args:
        reference: the steps of one process, whose parameters must all be there.
        steps: the steps of a plan.
        alone: the steps of one process in the precision of the plan; None: all is in float64.
    """
    for number, (wanted, step) in enumerate(zip(reference, steps, strict=True), 1):
        sizes = {
            name: step.gradients[name].relative if name in step.gradients else inf
            for name in wanted.gradients
        }
        if alone is not None:
            near, far = alone[number - 1], find_distance(step)
            most = FACTOR * find_distance(near)
            # The error of one number, the loss, may be near zero by chance.
            loss_differs = not step.loss <= max(FACTOR * near.loss, most)
            if far <= most and not loss_differs:
                continue
            ratios = {
                name: one.squared / max(near.gradients[name].squared, 1e-300)
                for name, one in step.gradients.items()
            }
            first = max(ratios, key=lambda name: ratios[name])
            what, size = ("loss", step.loss) if loss_differs else ("gradient", far)
            return Difference(number, what, first, size)
        first = next((name for name, size in sizes.items() if not size <= LIMIT), "")
        if step.routing:
            return Difference(number, "routing", step.routing[0], inf)
        if not step.loss <= LIMIT:
            return Difference(number, "loss", first, step.loss)
        if first:
            return Difference(number, "gradient", first, sizes[first])
    return None


def find_distance(step: StepDistances) -> float:
    """Return the distance of all gradients from the reference, over the reference's norm."""
    found = step.gradients.values()
    return sqrt(sum(one.squared for one in found) / max(sum(one.total for one in found), 1e-300))


def _describe(
    shrunk: Shrunk,
    notes: list[str],
    steps: Sequence[StepDistances],
    alone: Sequence[StepDistances] | None,
    difference: Difference | None,
) -> Verdict:
    sizes = {
        name: max(step.gradients[name].relative for step in steps) for name in steps[0].gradients
    }
    worst = max(sizes, key=lambda name: sizes[name], default="")
    return Verdict(
        shrunk,
        notes,
        max(step.loss for step in steps),
        sizes.get(worst, 0.0) if alone is None else max(map(find_distance, steps)),
        worst,
        len(sizes),
        steps[0].layers,
        None if alone is None else max(map(find_distance, alone)),
        difference,
    )
