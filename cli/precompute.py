"""`trainer precompute`: the outputs of a frozen model for all samples, before training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.errors import RecipeError
from ..engine.core.terminal import ProgressBar, format_clock, is_terminal
from .options import Force, Overrides, Recipe
from .ranks import NumProcesses, run_on_ranks


def precompute(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="where to; default: task.precomputed of the recipe")
    ] = None,
    force: Force = False,
    nproc: NumProcesses = 1,
) -> None:
    """Write what a recipe's reference or teacher says of each sample; an interrupted call resumes.

    Training with task.precomputed then reads it, and neither holds nor computes that model.
    """
    from ..engine.launch.environment import find_world
    from ..engine.recipe.load import load_recipe

    run_on_ranks(context, nproc)
    world, given = find_world(), list(overrides or [])
    if out is not None:
        from ..engine.recipe.write import toml_value

        given.append(f"task.precomputed={toml_value(str(out))}")
    loaded = load_recipe(recipe, given, world.world_size).recipe
    if loaded.task.find_outputs(loaded.loss) is None:
        raise RecipeError("no folder is named", "give --out DIR, or task.precomputed in the recipe")
    from ..engine.inference.precompute import precompute as write_outputs
    from ..engine.launch.group import pick_device, process_group

    device, seconds = pick_device(world), loaded.resilience.collective_timeout_seconds
    with process_group(world, device, seconds) as group, _show_samples() as watch:
        notes = write_outputs(loaded, world, device, group, replace_others=force, watch=watch)
    if world.rank == 0:
        print("\n".join(notes))


NOTE_SECONDS = 10.0


@contextmanager
def _show_samples() -> Iterator[Callable[[str, int, int], None]]:
    """Provide what draws a bar if stderr is a terminal, and else prints a line there at times."""
    started: dict[str, tuple[float, int]] = {}

    def estimate(split: str, done: int, total: int) -> float | None:
        """Return the seconds left, from the samples of this split since its first block."""
        since, first = started.setdefault(split, (time.monotonic(), done))
        speed = (done - first) / max(time.monotonic() - since, 1e-6)
        return (total - done) / speed if speed else None

    if is_terminal(sys.stderr):
        with closing(ProgressBar(sys.stderr)) as bar:
            bar.start()
            yield lambda split, done, total: bar.update(
                split,
                done,
                total,
                estimate(split, done, total),
                f"{done:,} of {total:,} samples",
                force=done == total,
            )
        return
    shown_at = time.monotonic()

    def show(split: str, done: int, total: int) -> None:
        nonlocal shown_at
        left = estimate(split, done, total)
        if time.monotonic() - shown_at > NOTE_SECONDS:
            shown_at = time.monotonic()
            eta = "" if left is None else f" · eta {format_clock(left)}"
            print(f"{split}: {done:,} of {total:,} samples{eta}", file=sys.stderr, flush=True)

    yield show
