"""`trainer run --dry-run --world N`: what a run of N ranks would be, from one process."""

from __future__ import annotations

from ..engine.core.errors import RecipeError
from ..engine.recipe.assets import find_missing_assets
from ..engine.recipe.load import Loaded
from .table import echo, print_table, print_warnings

RANKS_PER_NODE = 8


def describe_dry_run(loaded: Loaded, world_size: int, *, trains: bool, nproc: int) -> None:
    """Build the recipe for so many ranks without numbers, and print what they would do.

    The model is split, wrapped and stepped as each rank would, on fake process groups.

    Args:
        loaded: the recipe, checked for that number of ranks.
        world_size: the number of ranks.
        trains: whether the command would train.
        nproc: processes that the command would start.

    Raises:
        RecipeError: the recipe does not fit that number of ranks, or the command would train or
            start processes.
    """
    if trains or nproc > 1:
        raise RecipeError("--world is about --dry-run, on one process", "leave out --nproc")
    print_warnings(find_missing_assets(loaded))
    from ..engine.estimate import plan_tables
    from ..engine.estimate.plan import make_run_plan

    recipe = loaded.recipe
    plan = make_run_plan(recipe, world_size, RANKS_PER_NODE, on_gpu=True)
    echo(f"{recipe.run.name}: {plan_tables.describe_mesh(plan)}")
    print_table(list(plan_tables.cost_rows(plan)))
    echo(plan_tables.describe_flops(plan))
    echo("nothing was trained or written; `trainer plan` shows placement and traffic")
