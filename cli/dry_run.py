"""`trainer run --dry-run --world N`: builds a run of N ranks in one process."""

from __future__ import annotations

from collections.abc import Mapping

from ..engine.core.errors import RecipeError
from ..engine.recipe.assets import find_missing_assets
from ..engine.recipe.load import Loaded
from .table import echo, print_table, print_warnings

RANKS_PER_NODE = 8


def require_dry_run(dry_run: bool, others: Mapping[str, object]) -> None:
    """Refuse `--world` without `--dry-run`, or beside options that it would ignore.

    Args:
        dry_run: whether `--dry-run` is given.
        others: the values of such options by name.

    Raises:
        RecipeError: `--dry-run` is not given, or another option is.
    """
    if not dry_run:
        raise RecipeError("--world is an option of --dry-run", "add --dry-run")
    if given := ", ".join(name for name, value in others.items() if value):
        raise RecipeError(f"--world does not use {given}", "leave one of them out")


def describe_dry_run(loaded: Loaded, world_size: int) -> None:
    """Build the recipe for a number of ranks without tensor data, and print what they would do.

    The model is split, wrapped and stepped as each rank would, on fake process groups.

    Args:
        loaded: the recipe, checked for that number of ranks.
        world_size: the number of ranks.

    Raises:
        RecipeError: the recipe does not fit that number of ranks.
    """
    print_warnings(find_missing_assets(loaded))
    from ..engine.estimate import plan_tables
    from ..engine.estimate.plan import make_run_plan

    recipe = loaded.recipe
    plan = make_run_plan(recipe, world_size, RANKS_PER_NODE, on_gpu=True)
    echo(f"{recipe.run.name}: {plan_tables.describe_mesh(plan)}")
    print_table(list(plan_tables.cost_rows(plan)))
    echo(plan_tables.describe_flops(plan))
    echo("nothing was trained or written; `trainer plan` shows placement and traffic")
