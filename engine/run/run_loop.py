"""How a run trains: the place where federated training differs from an ordinary run."""

from __future__ import annotations

from collections.abc import Callable

from ..assemble.assemble import Assembled
from ..checkpoint.manifest import SaveInfo
from ..checkpoint.store import CheckpointStore
from ..core.errors import Problem, RecipeError
from ..launch.signals import StopFlag
from ..observe.observer import Observer
from ..recipe.schema import Recipe
from ..train.evaluate import Tasks
from ..train.health import Health
from ..train.loop import Outcome, train
from ..train.parts import Position
from ..train.saving import Saver


class RunLoop:
    """An ordinary run: one optimizer step after another."""

    def require(self, recipe: Recipe) -> None:
        """Refuse a recipe that this loop does not train.

        Raises:
            RecipeError: it describes federated training.
        """
        if recipe.federation:
            message = "the recipe describes federated training"
            hint = "run it with `trainer federate run`"
            raise RecipeError([Problem(message, key="federation", hint=hint)])

    def adapt(self, recipe: Recipe) -> Recipe:
        """Return the recipe of what each part of the ranks assembles."""
        return recipe

    def num_parts(self, recipe: Recipe) -> int:
        """Return into how many parts the ranks are divided, each with a default group of its own.

        Raises:
            RecipeError: the ranks cannot be divided so.
        """
        return 1

    def open_saver(
        self,
        store: CheckpointStore,
        parts: Assembled,
        health: Health,
        identity: SaveInfo,
        report: Callable[[str], None],
    ) -> Saver:
        """Return what saves and restores the run; see `Saver`."""
        return Saver(store, parts, health, identity, report)

    def train(
        self,
        parts: Assembled,
        position: Position,
        saver: Saver,
        health: Health,
        observer: Observer,
        stop: StopFlag,
        tasks: Tasks,
    ) -> Outcome:
        """Train from a position to the end; see `train.loop.train`."""
        return train(parts, position, saver, health, observer, stop, tasks)
