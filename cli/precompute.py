"""`trainer precompute`: the outputs of a frozen model for all samples, before training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
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
    if not loaded.task.frozen_key:
        raise RecipeError(f'the task "{loaded.task.name}" learns from no frozen model')
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
    bar = ProgressBar(sys.stderr) if is_terminal(sys.stderr) else None
    started: dict[str, tuple[float, int]] = {}
    shown_at = time.monotonic()

    def show(split: str, done: int, total: int) -> None:
        nonlocal shown_at
        now, text = time.monotonic(), f"{done:,} of {total:,} samples"
        since, first = started.setdefault(split, (now, done))
        left = (now - since) / max(done - first, 1) * (total - done)
        if bar:
            bar.update(split, done, total, left, text, force=done == total)
        elif now - shown_at > NOTE_SECONDS:
            shown_at = now
            print(f"{split}: {text} · eta {format_clock(left)}", file=sys.stderr, flush=True)

    with closing(bar) if bar else nullcontext():
        if bar:
            bar.start()
        yield show
