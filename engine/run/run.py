"""The life of a run: join the ranks, lock the directory, resume or start, train, leave."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ..assemble.assemble import Assembled, assemble
from ..checkpoint.find import IntactCheckpoint, code_before_training
from ..checkpoint.state import seed_everything
from ..checkpoint.store import CheckpointStore
from ..core.errors import ExitCode, LostContact, Stopped, TrainerError
from ..core.heartbeat import heartbeat
from ..core.run_dir import RunDirectory
from ..core.run_state import RunState, record_attempt, record_stop
from ..launch import ending as process_ending
from ..launch.environment import World
from ..launch.group import create_checkpoint_group, pick_device, process_group
from ..launch.signals import StopFlag
from ..observe.progress import Progress, forward_logs, open_progress
from ..recipe.changes import require_unchanged
from ..recipe.schema import Recipe
from ..train.evaluate import Tasks
from ..train.events import EventRecorder
from ..train.health import Health
from ..train.loop import Outcome, paced_garbage_collection
from ..train.parts import Position
from ..train.saving import Saver
from .export import export_run, require_exportable
from .hub_pins import pin_hub_ids
from .metadata import find_checkouts, write_recipe
from .resume import (
    describe,
    describe_model,
    find_start,
    identify,
    ignored_settings,
    make_state,
    reason_to_end,
    require_same_data,
    require_same_pins,
)
from .run_loop import RunLoop
from .tasks import load_tasks, open_tasks
from .watch import open_observer, watch_rank


def run(
    recipe: Recipe,
    world: World,
    *,
    allow_changed: Sequence[str] = (),
    dry_run: bool = False,
    parts: Assembled | None = None,
    stop: StopFlag | None = None,
    loop: RunLoop | None = None,
) -> ExitCode:
    """Train what a recipe describes, from its newest checkpoint or from the start.

    Args:
        recipe: what to train, validated.
        world: this process's place among the ranks.
        allow_changed: keys that may differ from those in the checkpoint.
        dry_run: assemble and describe, but train and write nothing.
        parts: of this recipe, assembled already.
        stop: listens to signals already.
        loop: how it trains; None: as an ordinary run.

    Returns:
        DONE, or after a signal STOPPED_AND_SAVED, or INTERRUPTED before there was anything to save.
    """
    loop = loop or RunLoop()
    loop.require(recipe)
    with ExitStack() as stack:
        if stop is None:
            stop = StopFlag()
            if threading.current_thread() is threading.main_thread():  # Python's rule for handlers
                stack.enter_context(stop)
        try:
            folder = recipe.run.folder
            answer = partial(code_before_training, folder, recipe.run.resume)
            if dry_run:
                stop.end_at_once()
            else:
                record = partial(record_stop, folder) if world.rank == 0 else None
                stop.end_at_once(answer, record)
            with stop.convert_errors():
                return _run(recipe, world, stop, allow_changed, loop, dry_run=dry_run, parts=parts)
        except Stopped as stopped:
            stop.leave_job(stopped.exit_code)
            process_ending.skip_teardown()
            is_saved = stopped.exit_code == ExitCode.STOPPED_AND_SAVED
            text = "run again to resume" if is_saved else "nothing was saved"
            open_progress(world.rank).note(f"stopped at once; {text}")
            return stopped.exit_code


def _run(
    recipe: Recipe,
    world: World,
    stop: StopFlag,
    allow_changed: Sequence[str],
    loop: RunLoop,
    *,
    dry_run: bool,
    parts: Assembled | None,
) -> ExitCode:
    """Join the other ranks, lock the directory and train."""
    recipe = pin_hub_ids(recipe)  # before the ranks meet: a download may outlast their timeout
    device = pick_device(world)
    directory = RunDirectory(recipe.run.folder)
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(watch_rank(directory, world, recipe.resilience.hang_seconds))
        timeout_seconds = recipe.resilience.collective_timeout_seconds
        group = stack.enter_context(
            process_group(world, device, timeout_seconds, stop.join, loop.num_parts(recipe))
        )
        require_same_pins(recipe, group)
        progress = open_progress(world.rank)
        stack.callback(progress.close)
        stack.enter_context(forward_logs(progress))
        # First of all: what they lack is told before a corpus is tokenised.
        loaded = load_tasks(recipe.evaluate.harness)
        if dry_run:
            own = world.divide(loop.num_parts(recipe))
            for line in describe(assemble(loop.adapt(recipe), own, device)):
                progress.note(line)
            stop.finish()
            return ExitCode.DONE
        session = Session(recipe, world, device, group, directory, stop, progress, loaded, loop)
        with stop.convert_errors():
            return session.train(allow_changed, parts)


@dataclass
class Session:
    """One attempt at a run, in a locked run directory."""

    recipe: Recipe
    world: World
    device: torch.device
    group: ProcessGroup | None
    directory: RunDirectory
    stop: StopFlag
    progress: Progress
    loaded_tasks: dict[str, Any]
    loop: RunLoop

    def train(self, allow_changed: Sequence[str], parts: Assembled | None = None) -> ExitCode:
        """Resume or start, and train to the end or to a signal."""
        recipe, store = self.recipe, self._open_store()
        found = find_start(recipe, store, self.progress.warn)
        if found is not None:
            require_unchanged(found.manifest.recipe, recipe.model_dump(), allow_changed)
        parts, position = self._assemble(parts, fresh=found is None), Position()
        self._print_notes(parts)
        checkouts = find_checkouts() if self.world.rank == 0 else []
        identity = identify(parts, found, checkouts, recipe)
        recorder, health = self._watch(parts, identity.attempt)
        saver = self.loop.open_saver(store, parts, health, identity, self.progress.warn)
        if found is not None:
            require_same_data(found.manifest, parts, allow_changed)
            if why := reason_to_end(found.manifest, parts):
                self.progress.note(f"{why}: {found.path} is the last checkpoint")
                saver.complete(found)
                self._finish_ended_run(parts, health, found, store.group)
                return ExitCode.DONE
            saver.restore(found.path, found.manifest, position)
            self.progress.note(f"resumed from {found.path} (step {position.step})")
        require_exportable(parts)
        tasks = open_tasks(parts, self.loaded_tasks)
        state = make_state(parts, position.step, identity, self.world.world_size)
        # Only now: a start that fails leaves the run's recipe and checkpoints as they were.
        if found is not None:
            store.abandon_beyond(found)
        if self.world.rank == 0:
            write_recipe(self.directory, recipe, identity, checkouts, state.device)
        with self._record(state), recorder.open_log(position.step):
            outcome = self._train(parts, position, saver, health, tasks)
            state.warnings = health.conclude()
            if outcome == "stopped":
                state.outcome = outcome
                self.stop.finish()
                text = f"stopped after step {position.step}, saved; run again to resume"
                self.progress.note(text)
                return ExitCode.STOPPED_AND_SAVED
            self._print_end(outcome, position, state.warnings)
            self._export(parts, position.step, store.group)
            state.outcome = "finished"
            self.stop.finish()
        return ExitCode.DONE

    def _assemble(self, parts: Assembled | None, *, fresh: bool) -> Assembled:
        """Seed the generators, from which initial weights are drawn, and return the run's parts."""
        own = self.world.divide(self.loop.num_parts(self.recipe))
        seed_everything(self.recipe.run.seed, own.rank)
        return parts or assemble(self.loop.adapt(self.recipe), own, self.device, fresh=fresh)

    def _finish_ended_run(
        self, parts: Assembled, health: Health, found: IntactCheckpoint, group: ProcessGroup | None
    ) -> None:
        """Complete the end of a run whose last step was saved: its export and its state.json."""
        state = make_state(parts, found.manifest.step, found.manifest, self.world.world_size)
        with self._record(state):
            state.warnings = health.conclude()
            self._export(parts, found.manifest.step, group, found)
            state.outcome = "finished"
            self.stop.finish()

    def _train(
        self, parts: Assembled, position: Position, saver: Saver, health: Health, tasks: Tasks
    ) -> Outcome:
        """Train and save the last state; an export that a signal would interrupt is left out."""
        with (
            self.stop.convert_errors(),
            closing(
                open_observer(parts, self.directory, self.progress, self.group, position.batch)
            ) as observer,
            paced_garbage_collection(self.recipe.run.gc_interval),
        ):
            try:
                outcome = self.loop.train(
                    parts, position, saver, health, observer, self.stop, tasks
                )
                # LostContact here: a rank died in its last save, and this is not the end of a run.
                is_asked = self.stop.agree()
            except LostContact:
                raise
            except TrainerError:
                saver.finish()  # a good state may still be on its way to the disk
                raise
            if outcome == "stopped" or (is_asked and self.recipe.checkpoint.export != "none"):
                return "stopped"
            # All is saved: closing trackers and exporting can be done again.
            if not is_asked:
                self.stop.end_at_once(lambda: ExitCode.STOPPED_AND_SAVED)
            return outcome

    def _record(self, state: RunState) -> AbstractContextManager[RunState]:
        return record_attempt(state, self.directory.path if self.world.rank == 0 else None)

    def _open_store(self) -> CheckpointStore:
        heartbeat.enter("resume")
        checkpoint, resilience = self.recipe.checkpoint, self.recipe.resilience
        job = self.group if self.loop.num_parts(self.recipe) > 1 else None
        store = CheckpointStore(
            self.directory.checkpoints,
            mode=checkpoint.mode,
            keep=checkpoint.keep,
            keep_every=checkpoint.keep_every,
            start=self.recipe.run.resume,
            names_latest=True,
            group=create_checkpoint_group(self.world, resilience.collective_timeout_seconds, job),
        )
        store.probe()
        return store

    def _watch(self, parts: Assembled, attempt: int) -> tuple[EventRecorder, Health]:
        """Return what examines each step, and what writes down the events that it finds."""
        folder = self.directory.path if self.world.rank == 0 else None
        recipe, warn, step = self.recipe, self.progress.warn, parts.step
        recorder = EventRecorder(folder, parts.loader, attempt, warn)
        # Monitors and a lookahead must know on the host whether the weights change.
        can_skip = step.weight_update.can_skip and not (recipe.metrics.monitors or parts.lookahead)
        return recorder, Health(
            recipe.resilience, self.device, step.scale, warn, recorder.record, can_skip=can_skip
        )

    def _print_notes(self, parts: Assembled) -> None:
        for note in [*parts.notes, describe_model(parts), f"run directory: {self.directory.path}"]:
            self.progress.note(note)
        for text in ignored_settings(parts):
            self.progress.warn(text)

    def _print_end(self, outcome: str, position: Position, warnings: Sequence[str]) -> None:
        for text in warnings:
            self.progress.warn(text)
        early = f"{outcome}, {position.best.describe()}" if outcome == "stopped early" else outcome
        self.progress.note(f"{early}: {position.step} steps in {self.directory.path}")

    def _export(
        self,
        parts: Assembled,
        step: int,
        group: ProcessGroup | None,
        found: IntactCheckpoint | None = None,
    ) -> None:
        """Write what `checkpoint.export` asks for, unless it is there."""
        if self.recipe.checkpoint.export != "none":
            heartbeat.enter("export")
            for folder in export_run(parts, self.directory.path, step, group, found):
                self.progress.note(f"exported {folder}")
