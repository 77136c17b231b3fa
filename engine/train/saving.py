"""Between the training loop and the checkpoint store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from ..checkpoint.reader import load_state
from ..checkpoint.store import CheckpointStore
from ..errors import CheckpointError
from . import state as train_state
from .best import Best
from .health import Health
from .position import Position

if TYPE_CHECKING:
    from torch import Tensor

    from ..assemble import Parts
    from ..checkpoint.manifest import Manifest, SaveInfo


class Saver:
    """Saves and restores a run: weights, optimizer, random numbers, position.

    Args:
        identity: what the manifest says of the run besides its position (recipe, versions, ...).
        report: tells the user of a save that failed while the run goes on.
    """

    max_failures = 3
    """saves in a row that may fail before the run ends: until then it has the one before"""

    def __init__(
        self,
        store: CheckpointStore,
        parts: Parts,
        health: Health,
        identity: SaveInfo,
        report: Callable[[str], None],
    ) -> None:
        self._store = store
        self._parts = parts
        self._health = health
        self._identity = identity
        self._report = report
        self._saved_step = -1
        self._failures = 0
        parts.step.before_update = self.wait_staged

    def save(self, position: Position, *, last: bool = False, sync: bool = False) -> None:
        """Save the state after `position.step` steps, unless that is saved already.

        With `keep_best`, a state whose evaluation is the best so far becomes `checkpoints/best`.

        Args:
            position: how far the run is.
            last: the run ends here.
            sync: return when it is saved, whatever the mode.

        Raises:
            CheckpointError: a `sync` save failed, or several others in a row did.
        """
        self._settle(self._store.finish)
        if self._saved_step >= 0:
            self._failures = 0
        if position.step == self._saved_step:
            return
        self._health.verify()
        parts = self._parts
        table = parts.recipe.checkpoint
        contents: Literal["full", "weights"] = table.last if last else "full"
        tensors = train_state.model_state(parts.model)
        tensors |= parts.average.state() if parts.average else {}
        if contents == "full":
            tensors |= train_state.optimizer_state(parts.model, parts.optimizer)
            tensors |= train_state.random_state(parts.world.rank)
        info = replace(
            self._identity,
            step=position.step,
            samples=position.batch * parts.recipe.data.global_batch,
            contents=contents,
            extra={
                "tokens": int(position.tokens),
                "loss_scale": parts.step.scale.state(),
                "optimizer_numbers": self._optimizer_numbers(),
                "streams": parts.data.train.state(position.batch * parts.recipe.data.global_batch),
                "best": position.best.state(),
            },
        )
        best = table.keep_best and position.best.step == position.step
        self._saved_step = position.step
        if sync:
            self._store.save(tensors, info, best=best, sync=True)
        else:
            self._settle(lambda: self._store.save(tensors, info, best=best))

    def _optimizer_numbers(self) -> dict[str, float]:
        """Return the numbers of all parameters, also of those that other stages hold."""
        numbers = train_state.optimizer_numbers(self._parts.model, self._parts.optimizer)
        if self._parts.degrees.pipeline == 1:
            return numbers
        everywhere: list[dict[str, float]] = [{} for _ in range(self._parts.degrees.world)]
        dist.all_gather_object(everywhere, numbers, self._store.group)
        return {name: number for each in everywhere for name, number in each.items()}

    def _settle(self, work: Callable[[], None]) -> None:
        """Let a save fail, now and then: the checkpoint before it is still there."""
        try:
            work()
        except CheckpointError as error:
            self._saved_step = -1
            self._failures += 1
            if self._failures == self.max_failures:
                raise
            self._report(
                f"{error.message} (failure {self._failures} of at most {self.max_failures} in a "
                "row; the run goes on with the checkpoint before)"
            )

    def restore(self, path: Path, manifest: Manifest, position: Position) -> None:
        """Read a full checkpoint into the run, in place.

        Raises:
            CheckpointError: it holds weights only, or does not fit.
        """
        if manifest.contents != "full":
            raise CheckpointError(
                f"{path} holds weights only: a run cannot go on from it",
                "start a new run with run.init_from",
            )
        parts, rank = self._parts, self._parts.world.rank
        train_state.prepare_optimizer(
            parts.model, parts.optimizer, manifest.tensors, manifest.extra["optimizer_numbers"]
        )
        tensors: dict[str, Tensor] = train_state.model_state(parts.model)
        tensors |= train_state.optimizer_state(parts.model, parts.optimizer)
        if parts.average:
            tensors |= parts.average.prepare(manifest.tensors)
        generators = train_state.random_state(rank) if rank < manifest.world else {}
        state, elsewhere = {**tensors, **generators}, parts.model.saved_elsewhere
        load_state(path, manifest, state, self._store.group, elsewhere)
        if generators:
            train_state.restore_random_state(rank, generators)
        position.step = manifest.step
        position.batch = manifest.samples // parts.recipe.data.global_batch
        position.tokens = manifest.extra["tokens"]
        parts.data.train.restore(manifest.extra.get("streams", {}))
        position.best = Best.restored(manifest.extra)
        if parts.recipe.checkpoint.keep_best:
            self._store.settle_best(position.best.step, position.step)
        parts.step.scale.restore(manifest.extra["loss_scale"])
        self._saved_step = manifest.step

    def roll_back(self, position: Position) -> None:
        """Go back to the newest checkpoint, but stay behind the data that was read.

        Raises:
            CheckpointError: there is none.
        """
        batch = position.batch
        self._store.finish()
        found = self._store.latest()
        if found is None:
            raise CheckpointError(
                "nothing to roll back to: no checkpoint yet", "lower checkpoint.interval"
            )
        self.restore(found.path, found.manifest, position)
        position.batch = batch

    def wait_staged(self) -> None:
        """Wait until the state being saved is copied; the step calls it before weights change."""
        with self._parts.step.phase("checkpoint"):
            self._store.wait_staged()

    def poll(self) -> None:
        """Tell of a save in the background that went wrong.

        Raises:
            CheckpointError: too many did, one after the other.
        """
        self._settle(self._store.poll)

    def finish(self) -> None:
        """Wait for the save in flight."""
        self._store.finish()
