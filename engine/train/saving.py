"""Between the training loop and the checkpoint store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from ..checkpoint import state as train_state
from ..checkpoint.ranks import Ranks
from ..checkpoint.reader import load_state
from ..checkpoint.store import CheckpointStore
from ..core import faults
from ..core.errors import CheckpointError, Diverged
from ..core.heartbeat import heartbeat
from .health import Health
from .parts import Best, Position

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoint.manifest import Manifest, SaveInfo
    from .parts import Parts


class Saver:
    """Saves and restores a run: weights, optimizer, random numbers, position.

    Args:
        identity: what the manifest says of the run besides its position (recipe, versions, ...).
        report: tells the user of a save that failed while the run continues.
    """

    tolerated_failures = 2
    """saves in a row that may fail while training continues: there is the checkpoint before"""
    pauses_seconds = (1.0, 5.0)
    """before each further attempt at a save that must not fail"""

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
        self._ranks = Ranks(store.group)
        self._saved_step = -1
        self._failures = 0

    def save(self, position: Position) -> None:
        """Save the state after `position.step` steps, unless that is saved already.

        With `keep_best`, a state whose evaluation is the best so far becomes `checkpoints/best`. A
        failure is reported and training continues, until it is the third in a row.

        Raises:
            CheckpointError: this save failed as often as it was tried, after others that failed.
        """
        self.finish()
        if self._failures >= self.tolerated_failures:
            self.save_last(position)
        elif position.step != self._saved_step:
            self._tolerate(lambda: self._submit(position))

    def save_last(self, position: Position, contents: Literal["full", "weights"] = "full") -> None:
        """Save the state that the run ends with, and return when it is on the disk.

        No step follows that could save again, so a failure is not tolerated: the save is tried
        again, and then the run fails. All ranks decide alike, since each failure is that of all.

        Args:
            position: how far the run is.
            contents: of the checkpoint.

        Raises:
            CheckpointError: it failed each time; the message says which steps are lost.
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
        """Start a save, or do it, as the mode or `sync` says."""
        self._health.verify()
        parts = self._parts
        table = parts.checkpoint
        tensors = train_state.model_state(parts.model)
        tensors |= parts.average.state() if parts.average else {}
        if contents == "full":
            tensors |= train_state.optimizer_state(parts.model, parts.optimizer)
            tensors |= train_state.random_state(parts.world.rank)
        if self._is_spoiled(tensors, position.step, must_save=sync):
            return
        info = replace(
            self._identity,
            step=position.step,
            samples=position.batch * parts.global_batch,
            contents=contents,
            extra={
                "tokens": int(position.tokens),
                "loss_scale": parts.step.scale.state(),
                "optimizer_numbers": self._optimizer_numbers(),
                "streams": parts.data.train.state(position.batch * parts.global_batch),
                "best": position.best.state(),
                "health": self._health.state(),
                "unevaluated": position.unevaluated,
            },
        )
        best = table.keep_best and position.best.step == position.step
        self._saved_step = position.step
        self._store.save(tensors, info, best=best, sync=sync)

    def _is_spoiled(self, tensors: Mapping[str, Tensor], step: int, *, must_save: bool) -> bool:
        """Return whether the last update made weights that are not finite: none are ever saved.

        Raises:
            Diverged: nothing will go back to the checkpoint before.
        """
        find = partial(train_state.non_finite, tensors)
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

    def _optimizer_numbers(self) -> dict[str, float]:
        """Return the numbers of all parameters, also of those that other stages hold."""
        numbers = train_state.optimizer_numbers(self._parts.model, self._parts.optimizer)
        if self._parts.degrees.pipeline == 1:
            return numbers
        everywhere: list[dict[str, float]] = [{} for _ in range(self._parts.degrees.world)]
        dist.all_gather_object(everywhere, numbers, self._store.group)
        return {name: number for each in everywhere for name, number in each.items()}

    def _tolerate(self, work: Callable[[], None]) -> None:
        """Let a save fail: the checkpoint before it is still there, and others follow."""
        try:
            work()
        except CheckpointError as error:
            self._saved_step = -1
            self._failures += 1
            self._report(
                f"{error.message} (failure {self._failures} of at most {self.tolerated_failures} "
                "in a row; the run continues with the checkpoint before)"
            )

    def _loss_of(self, step: int, error: CheckpointError) -> CheckpointError:
        """Return an error that says what is lost when the state after `step` cannot be saved."""
        try:
            found = self._store.latest()
        except CheckpointError:
            found = None
        first = found.manifest.step + 1 if found else 1
        lost = f"steps {first} to {step} are lost" if first < step else f"step {step} is lost"
        if first > step:
            lost = "no step is lost"
        where = (
            f"the newest intact checkpoint is {found.path}" if found else "no checkpoint is intact"
        )
        tries = len(self.pauses_seconds) + 1
        message = (
            f"{error.message}; the save after step {step} failed {tries} times: {lost}, {where}"
        )
        return CheckpointError(message, error.hint)

    def restore(self, path: Path, manifest: Manifest, position: Position) -> None:
        """Read a full checkpoint into the run, in place.

        Raises:
            CheckpointError: it holds weights only, or does not fit.
        """
        heartbeat.enter("resume")
        if manifest.contents != "full":
            raise CheckpointError(
                f"{path} holds weights only: a run cannot resume from it",
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
        faults.point("checkpoint.read", rank, manifest.step)
        load_state(path, manifest, state, self._store.group, elsewhere)
        if generators:
            train_state.restore_random_state(rank, generators)
        position.step = manifest.step
        position.batch = manifest.samples // parts.global_batch
        position.tokens = manifest.extra["tokens"]
        parts.data.train.restore(manifest.extra.get("streams", {}))
        position.best = Best.restored(manifest.extra)
        self._health.restore(manifest.extra.get("health", {}))
        position.unevaluated = manifest.extra.get("unevaluated", False)
        if parts.checkpoint.keep_best:
            self._store.settle_best(position.best.step, position.step)
        parts.step.scale.restore(manifest.extra["loss_scale"])
        self._saved_step = -1 if position.unevaluated else manifest.step

    def roll_back(self, position: Position) -> bool:
        """Go back to the newest checkpoint, but stay behind the data that was read.

        Returns:
            False where there is none yet, and leaving the step out must do.

        Raises:
            CheckpointError: there is none, and the step has changed weights already.
        """
        batch = position.batch
        self.finish()
        found = self._store.latest()
        if found is None:
            what = "nothing to roll back to: no checkpoint yet"
            if self._parts.step.weight_update.in_backward:
                raise CheckpointError(what, "lower checkpoint.interval")
            self._report(f"{what}; the step is skipped")
            return False
        counts = self._health.counts
        self.restore(found.path, found.manifest, position)
        position.batch, self._health.counts = batch, counts
        return True

    def wait_staged(self) -> None:
        """Wait until the state being saved is copied; to be called before weights change."""
        with self._parts.phases("checkpoint"):
            self._store.wait_staged()

    def poll(self) -> None:
        """Report a save in the background that failed."""
        self._tolerate(self._store.poll)

    def finish(self) -> None:
        """Wait for the save in flight, and report it if it failed."""
        self._tolerate(self._store.finish)
        if self._saved_step >= 0:
            self._failures = 0
