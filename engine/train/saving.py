"""Saves a run to its checkpoint store while it trains, and restores it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from ..checkpoint import state as train_state
from ..checkpoint.find import IntactCheckpoint
from ..checkpoint.manifest import Manifest, SaveInfo
from ..checkpoint.ranks import Ranks
from ..checkpoint.reader import load_state
from ..checkpoint.store import CheckpointStore
from ..core import faults
from ..core.errors import CheckpointError, Diverged
from ..core.heartbeat import heartbeat
from ..optim.tables import ScheduleState
from .average import RESUMED
from .health import Health
from .parts import Best, Parts, Position
from .training_state import TrainingState


class Saver:
    """Saves and restores a run: weights, optimizer, random numbers, position.

    Args:
        store: the checkpoints of the run.
        parts: the parts of the run, restored in place.
        health: its state is saved, and no step is saved before it was examined.
        identity: what manifests say of the run besides its position (recipe, versions, ...).
        report: tells the user about a save that failed while the run continues.
        state: what is saved beside weights and position; None: that of an ordinary run.
    """

    tolerated_failures = 2
    """saves in a row that may fail while training continues: an older checkpoint exists"""
    pauses_seconds = (1.0, 5.0)
    """waits before further attempts at a save that must not fail"""

    def __init__(
        self,
        store: CheckpointStore,
        parts: Parts,
        health: Health,
        identity: SaveInfo,
        report: Callable[[str], None],
        state: TrainingState | None = None,
    ) -> None:
        self._store = store
        self._parts = parts
        self._health = health
        self._identity = identity
        self._report = report
        self._state = state or TrainingState(parts, store.group)
        self._ranks = Ranks(store.group)
        self._saved_step = -1
        self._failures = 0

    def save(self, position: Position) -> None:
        """Save the state after `position.step` steps, unless that is saved already.

        With `keep_best`, a state whose evaluation is the best so far becomes `checkpoints/best`. A
        failure is reported and training continues, until it is the third in a row.

        Raises:
            CheckpointError: the third save in a row failed in all of its attempts.
        """
        self.finish()  # at most one save is in flight
        if self._failures >= self.tolerated_failures:
            self.save_last(position)
        elif position.step != self._saved_step:
            self._tolerate(lambda: self._submit(position))

    def save_last(self, position: Position, contents: Literal["full", "weights"] = "full") -> None:
        """Save the state that the run ends with, and return when it is on the disk.

        A failed save is tried again, and then the run fails, because no later step saves again.
        All ranks decide alike: the store makes the failure of one the failure of all.

        Args:
            position: how far the run is.
            contents: "weights" leaves out optimizer and random numbers.

        Raises:
            CheckpointError: every attempt failed; the message says which steps are lost.
        """
        self.finish()
        if position.step == self._saved_step:
            return
        for pause in (*self.pauses_seconds, None):
            try:
                self._submit(position, contents, sync=True)
                self._failures = 0
                return
            except CheckpointError as error:
                # Without this the next attempt would take the state for saved.
                self._saved_step = -1
                if pause is None:
                    raise self._loss_of(position.step, error) from error
                self._report(f"{error.message} (trying again in {pause:.0f} s)")
                time.sleep(pause)

    def _submit(
        self,
        position: Position,
        contents: Literal["full", "weights"] = "full",
        *,
        sync: bool = False,
    ) -> None:
        """Start a save; wait for it if `sync` or the checkpoint mode says so."""
        self._health.verify()  # raises if a step was not finite: such a state is never saved
        parts = self._parts
        table = parts.checkpoint
        tensors = train_state.model_state(parts.model)
        for average in parts.averages:
            tensors |= average.state()
        if contents == "full":
            tensors |= self._state.tensors()
        else:  # without the weights that only training needs
            tensors = {name: x for name, x in tensors.items() if not name.startswith(RESUMED)}
        if self._is_spoiled(tensors, position.step, must_save=sync):
            return
        info = replace(
            self._identity,
            step=position.step,
            samples=parts.loader.turns.count_samples(position.batch),
            contents=contents,
            extra={
                # The copy to the host waits for the device, which a save does in any case.
                "count": int(position.count),
                "best": asdict(position.best),
                "schedule": asdict(position.schedule),
                "health": self._health.state(),
                "unevaluated": position.unevaluated,
                **self._state.numbers(position),
            },
        )
        best = table.keep_best and position.best.step == position.step
        self._saved_step = position.step
        self._store.save(tensors, info, best=best, sync=sync)

    def _is_spoiled(self, tensors: Mapping[str, Tensor], step: int, *, must_save: bool) -> bool:
        """Return whether the last update made weights that are not finite, which are not saved.

        Raises:
            Diverged: the run cannot roll back, because it ends here or the policy is another.
        """
        # The next loss would show it, but the state of this step is saved before that.
        find = partial(train_state.find_non_finite, tensors)
        names = self._ranks.reduce(
            find, lambda parts: sorted({name for part in parts for name in part})
        )
        if not names:
            return False
        what = f"step {step}: {names[0]} is not finite after the update"
        what += f", and {len(names) - 1} more" if len(names) > 1 else ""
        if must_save or self._parts.resilience.non_finite != "rollback":
            raise Diverged(what, "lower optimizer.lr")
        self._report(f"{what}: not saved")
        return True

    def _tolerate(self, work: Callable[[], None]) -> None:
        """Report a save that fails: there is an older checkpoint, and later saves follow."""
        try:
            work()
        except CheckpointError as error:
            self._saved_step = -1
            self._failures += 1
            self._report(
                f"{error.message} (failure {self._failures} of at most {self.tolerated_failures} "
                "in a row; the run continues with an older checkpoint)"
            )

    def _loss_of(self, step: int, error: CheckpointError) -> CheckpointError:
        """Return an error that says which steps are lost if the state after `step` is not saved."""
        try:
            # It verifies checksums: a checkpoint that the disk has damaged does not count.
            newest = self._store.latest()
        except CheckpointError:
            newest = None
        first = newest.manifest.step + 1 if newest else 1
        lost = f"steps {first} to {step} are lost" if first < step else f"step {step} is lost"
        if first > step:
            lost = "no step is lost"
        where = (
            f"the newest intact checkpoint is {newest.path}"
            if newest
            else "no checkpoint is intact"
        )
        tries = len(self.pauses_seconds) + 1
        message = (
            f"{error.message}; the save after step {step} failed {tries} times: {lost}, {where}"
        )
        return CheckpointError(message, error.hint)

    def restore(
        self, path: Path, manifest: Manifest, position: Position, *, is_rollback: bool = False
    ) -> None:
        """Restore the run from a full checkpoint, in place.

        Args:
            path: folder of the checkpoint.
            manifest: its verified manifest.
            position: set to the position in the checkpoint.
            is_rollback: whether the run goes back to a checkpoint of its own.

        Raises:
            CheckpointError: the checkpoint holds weights only, or does not fit the run.
        """
        heartbeat.enter("resume")
        if manifest.contents != "full":
            raise CheckpointError(
                f"{path} holds weights only: a run cannot resume from it",
                "start a new run with run.init_from",
            )
        parts = self._parts
        prepared = self._state.prepare(manifest)
        tensors = {**train_state.model_state(parts.model), **prepared}
        for average in parts.averages:
            tensors |= average.prepare(manifest.tensors)
        faults.point("checkpoint.read", parts.world.rank, manifest.step)
        load_state(path, manifest, tensors, self._store.group, parts.model.remote_state)
        self._state.restore(manifest, prepared)
        position.step = manifest.step
        # Counted in samples, so that data.global_batch may differ from the saving run's.
        position.batch = parts.loader.turns.find_batch(manifest.samples)
        position.count = manifest.extra["count"]
        position.best = Best.from_manifest(manifest.extra)
        position.schedule = ScheduleState(**manifest.extra.get("schedule", {}))
        self._health.restore(manifest.extra.get("health", {}), keep_counts=is_rollback)
        position.unevaluated = manifest.extra.get("unevaluated", False)
        if parts.checkpoint.keep_best:
            self._store.restore_best_alias(position.best.step, position.step)
        self._saved_step = -1 if position.unevaluated else manifest.step

    def complete(self, found: IntactCheckpoint) -> None:
        """Complete the last save of a run that has ended, where a kill has cut it short."""
        extra = found.manifest.extra
        best = Best.from_manifest(extra).step if self._parts.checkpoint.keep_best else None
        self._store.complete(found.path, best)
        self._health.restore(extra.get("health", {}))

    def roll_back(self, position: Position) -> bool:
        """Restore the newest checkpoint, but continue after the data that was read.

        Args:
            position: set to the checkpoint's, apart from the batch.

        Returns:
            False if there is no checkpoint yet, so that the step is only skipped.

        Raises:
            CheckpointError: there is no checkpoint, and the step has already changed weights.
        """
        batch = position.batch
        self.finish()
        newest = self._store.latest()
        if newest is None:
            what = "nothing to roll back to: no checkpoint yet"
            if self._parts.step.weight_update.in_backward:
                raise CheckpointError(what, "lower checkpoint.interval")
            self._report(f"{what}; the step is skipped")
            return False
        self.restore(newest.path, newest.manifest, position, is_rollback=True)
        position.batch = batch
        return True

    def is_saved(self, step: int) -> bool:
        """Return whether the state after `step` steps is on the disk."""
        self.finish()
        return self._saved_step == step

    def wait_staged(self) -> None:
        """Wait until the state of a save in the background is copied, before weights change."""
        with self._parts.phases("checkpoint"):
            self._store.wait_staged()

    def poll(self) -> None:
        """Report a save in the background if it has failed."""
        self._tolerate(self._store.poll)

    def finish(self) -> None:
        """Wait for the save in flight, and report it if it has failed."""
        self._tolerate(self._store.finish)
        if self._saved_step >= 0:
            self._failures = 0
