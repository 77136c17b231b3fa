"""Saving and resuming for training loops of users' own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..assemble.assemble import Assembled
from ..checkpoint.store import CheckpointStore
from ..core.files import atomic_write
from ..core.run_dir import RunDirectory
from ..launch.group import create_checkpoint_group
from ..recipe.changes import require_unchanged
from ..recipe.write import to_toml
from ..train.health import Health
from ..train.parts import Position
from ..train.saving import Saver
from .resume import find_start, identify, require_same_data


@contextmanager
def open_saver(parts: Assembled) -> Iterator[tuple[Saver, Position]]:
    """Lock the run directory of assembled parts, and resume as `run.resume` says.

    Weights, optimizer, random numbers and the place in the data are restored into `parts` as
    `trainer run` restores them; without a checkpoint nothing changes. All ranks call it together.

    Args:
        parts: what `assemble` returned.

    Yields:
        the saver, whose `save(position)` and `save_last(position)` write checkpoints that every
        command reads, and the position, which the loop keeps up to date: `step`, `batch` and
        `count` grow with each step. `saver.wait_staged()` belongs before each change of weights.

    Raises:
        RunInUse: another run has the directory.
        RecipeError: the recipe or the data differ from those of the checkpoint, or `run.resume` is
            "never" and there are checkpoints.
        CheckpointError: a checkpoint cannot be read or written.
    """
    recipe, world = parts.recipe, parts.world
    directory = RunDirectory(recipe.run.folder)
    with ExitStack() as stack:
        if world.rank == 0:
            stack.enter_context(directory)
        table, timeout_seconds = recipe.checkpoint, recipe.resilience.collective_timeout_seconds
        group = create_checkpoint_group(world, timeout_seconds)
        store = CheckpointStore(
            directory.checkpoints,
            mode=table.mode,
            keep=table.keep,
            keep_every=table.keep_every,
            group=group,
            start=recipe.run.resume,
        )
        store.probe()
        found = find_start(recipe, store, warnings.warn)
        health = Health(recipe.resilience, parts.device, parts.step.scale, warnings.warn)
        saver = Saver(store, parts, health, identify(parts, found, []), warnings.warn)
        position = Position()
        if found is not None:
            require_unchanged(found.manifest.recipe, recipe.model_dump())
            require_same_data(found.manifest, parts, ())
            saver.restore(found.path, found.manifest, position)
            store.abandon_beyond(found)
        elif world.rank == 0:
            atomic_write(directory.recipe, to_toml(recipe))
        try:
            yield saver, position
        finally:
            saver.finish()  # a save in the background may still be on its way to the disk
