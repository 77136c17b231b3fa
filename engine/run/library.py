"""Training from Python: what `trainer run` does, and the parts it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ExitCode, RecipeError, TrainerError, nearest
from ..launch.environment import World, find_world
from ..observe.metrics import read
from ..recipe import load
from ..recipe.schema import Recipe
from ..recipe.write import toml_value
from .hub_pins import pin_hub_ids

if TYPE_CHECKING:
    from ..assemble.assemble import Assembled
    from ..conversion.convert import Converted


@dataclass(frozen=True)
class Result:
    """How a run ended, and where its files are."""

    directory: Path
    """`recipe.toml`, `metrics.jsonl`, `checkpoints/`"""
    finished: bool
    """False: a signal asked it to stop; it saved, and training again resumes"""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: `kind`, `step` and numbers."""
        return read(self.directory / "metrics.jsonl")


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Recipe:
    """Read, merge and check a recipe.

    Args:
        path: the TOML file.
        overrides: values by dotted key, `{"run.steps": 5}`, or `["run.steps=5"]` as after `--set`.

    Raises:
        RecipeError: everything that is wrong with it.
    """
    if isinstance(overrides, Mapping):
        overrides = list(_as_texts(overrides))
    return load.load_recipe(path, overrides, world=find_world().world_size).recipe


@contextmanager
def joined_ranks(recipe: Recipe) -> Iterator[World]:
    """Join the other ranks of the job that the environment describes; alone, do nothing.

    What several ranks do together (`assemble`, a loop of your own) belongs inside.

    Yields:
        this process's place among the ranks.

    Raises:
        EnvironmentFault: they could not meet.
    """
    from ..launch.group import pick_device, process_group

    world = find_world()
    with process_group(world, pick_device(world), recipe.resilience.collective_timeout_seconds):
        yield world


def assemble(recipe: Recipe) -> Assembled:
    """Build what a training loop needs, on this process's device and place among the ranks.

    Torch's and Python's generators are seeded with `run.seed`. Weights are initial ones, or those
    of `run.init_from`.

    Raises:
        RecipeError: the recipe does not fit the model, the data or the number of ranks.
        DataError: a source cannot be read.
        TrainerError: there are other ranks, and `joined_ranks` was not entered.
    """
    import torch.distributed as dist

    from ..assemble.assemble import assemble as build
    from ..checkpoint.state import seed_everything
    from ..launch.group import pick_device

    world = find_world()
    if world.world_size > 1 and not dist.is_initialized():
        raise TrainerError(
            f"rank {world.rank} of {world.world_size} has not joined the others",
            "assemble inside `with trainer.joined_ranks(recipe):`",
        )
    recipe = pin_hub_ids(recipe)
    seed_everything(recipe.run.seed, world.rank)
    return build(recipe, world, pick_device(world))


def train(what: Recipe | Assembled, *, allow_changed: Sequence[str] = ()) -> Result:
    """Train as `trainer run` does: resume or start, evaluate, save, write metrics.

    Signals ask it to stop only where Python allows handlers: in the main thread.

    Args:
        what: a recipe, or the parts that were assembled from one.
        allow_changed: keys that may differ from those in the checkpoint.

    Raises:
        TrainerError: whatever ends a run; each subclass says what went wrong.
    """
    from .run import run

    parts = None if isinstance(what, Recipe) else what
    recipe = what if isinstance(what, Recipe) else what.recipe
    code = run(recipe, find_world(), allow_changed=allow_changed, parts=parts)
    return Result(recipe.run.folder, finished=code == ExitCode.DONE)


def convert(direction: str, source: str | Path, target: str | Path, **options: Any) -> Converted:
    """Convert a checkpoint; the target appears when it is complete.

    Args:
        direction: such as "hf2dcp" or "dcp2hf": see `trainer convert-ckpt --help`.
        source: a checkpoint, or a run directory, whose newest intact checkpoint is taken.
        target: must not exist.
        options: fields of `engine.conversion.convert.Options`.

    Raises:
        RecipeError: the direction is unknown, or the target exists.
        CheckpointError: the source cannot be read or does not fit, or writing failed.
    """
    from ..conversion import convert as conversion

    if direction not in conversion.CONVERSIONS:
        hint = nearest(direction, conversion.CONVERSIONS) or ""
        raise RecipeError(f"no conversion is named {direction!r}", hint)
    chosen = conversion.Options(**options)
    return conversion.convert(direction, Path(source), Path(target), chosen)


def _as_texts(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `key=value` for each value of a tree."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _as_texts(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={toml_value(str(value) if isinstance(value, Path) else value)}"
