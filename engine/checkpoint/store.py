"""The checkpoints of a run: complete, verified and durable, or absent."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..core.errors import CheckpointError, EnvironmentFault
from . import retention
from .commit import Staging, commit, free_bytes
from .find import IntactCheckpoint, newest_intact
from .manifest import Manifest, SaveInfo, read_manifest
from .ranks import Ranks
from .tables import checkpoint_modes
from .writer import Writer

log = logging.getLogger(__name__)


class CheckpointStore:
    """Saves states under `folder`, one at a time, and finds the newest that is intact.

    All ranks call the same methods in the same order. The folder is seen by all ranks, and owned
    by this run alone.

    Args:
        mode: a name of `checkpoint_modes`.
        keep: how many of the newest checkpoints are kept.
        keep_every: checkpoints whose step is a multiple of it are kept too; 0: none.
        start: path of a checkpoint that is kept as well, such as `run.resume`.
        group: a gloo group of all ranks that nothing else uses, because a save in the background
            communicates too; None: one process, and no collective is ever called.
        names_latest: whether the alias `latest` points to the newest checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        mode: str,
        keep: int,
        group: ProcessGroup | None,
        names_latest: bool = False,
        keep_every: int = 0,
        start: str = "",
    ) -> None:
        self.folder = folder
        self.group = group
        self._prune = partial(retention.prune, folder, keep, keep_every, start)
        self._names_latest = names_latest
        self._ranks = Ranks(group)
        allocate = checkpoint_modes[mode].model_validate({"name": mode}).build()
        self._copies = allocate is not None
        self._writer = Writer(self._ranks, allocate)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._in_flight: Future[None] | None = None
        self._staging: Staging | None = None
        self._failure: BaseException | None = None

    def probe(self) -> None:
        """Make the folder ready at the start of a run, and check that it can be written.

        Raises:
            EnvironmentFault: the folder cannot be written, or has no space for another checkpoint.
        """
        self._ranks.reduce(lambda: None, lambda _: self._make_ready())

    def save(
        self,
        state: Mapping[str, Tensor],
        info: SaveInfo,
        *,
        best: bool = False,
        sync: bool = False,
    ) -> None:
        """Save a flat state of tensors and DTensors; what differs by rank has the rank in its name.

        At most one save is in flight: this waits for the one before. A save in the background
        reads the state after this returns: call `wait_staged` before anything changes it.

        Args:
            state: names and tensors.
            info: for the manifest.
            best: True lets the alias `best` point to this checkpoint once it is published.
            sync: True returns when the state is saved, whatever the mode.

        Raises:
            CheckpointError: a save that is not in the background failed; nothing is left of it.
        """
        self._wait()
        aliases = [retention.BEST] * best + [retention.LATEST] * self._names_latest
        # One save at a time: a second one would need memory for another copy of the state.
        if sync or not self._copies:
            self._commit(state, info, aliases, None)
            return
        # The thread has a stream of its own, which must wait for the kernels that made the state.
        on_gpu = any(tensor.is_cuda for tensor in state.values())
        self._staging = Staging(torch.cuda.current_stream().record_event() if on_gpu else None)
        self._in_flight = self._thread.submit(self._commit, state, info, aliases, self._staging)

    def wait_staged(self) -> None:
        """Wait until the state being saved has been copied; at once when nothing is."""
        if self._staging is None:
            return
        self._staging.done.wait()
        if self._staging.copied is not None:
            # The GPU waits, and this thread does not: the copies may still be under way.
            torch.cuda.current_stream().wait_event(self._staging.copied)
        self._staging = None

    def poll(self) -> None:
        """Raise what failed in the background, once. Ranks may notice at different steps.

        Raises:
            CheckpointError: why the last save failed. The checkpoints before it are untouched.
        """
        if self._in_flight is not None and self._in_flight.done():
            self._wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Wait for the save in flight.

        Raises:
            CheckpointError: it failed.
        """
        self._wait()
        self.poll()

    def latest(
        self, is_wanted: Callable[[Manifest], bool] | None = None
    ) -> IntactCheckpoint | None:
        """Return the newest checkpoint whose every byte is as it was saved; None: there is none.

        Args:
            is_wanted: see `find.newest_intact`.

        Raises:
            CheckpointError: there are checkpoints, and none is intact.
        """
        self._wait()
        return newest_intact(self.folder, self._ranks, is_wanted=is_wanted)

    def restore_best_alias(self, best: int, last: int) -> None:
        """Make the alias `best` what it was after step `last`, when step `best` was the best."""
        self._ranks.reduce(
            lambda: None, lambda _: retention.restore_best_alias(self.folder, best, last)
        )

    def abandon_beyond(self, found: IntactCheckpoint) -> None:
        """Rename the checkpoints of later steps than the one that the run resumes from.

        Otherwise the next start could resume from one of them, whose rows metrics.jsonl has lost.
        Where later checkpoints are damaged, nothing is renamed: later saves replace those.

        Raises:
            EnvironmentFault: one cannot be renamed.
        """
        if found.skipped:
            return
        step = found.manifest.step
        self._ranks.reduce(lambda: None, lambda _: self._abandon_beyond(step))

    def _abandon_beyond(self, step: int) -> None:
        try:
            retention.abandon_beyond(self.folder, step)
        except OSError as error:
            raise EnvironmentFault(
                f"a checkpoint beyond step {step:,} cannot be renamed: {error}",
                "the run resumes from this step: remove the later checkpoints, or give another "
                "run.dir",
            ) from error
        if self._names_latest:
            retention.restore_latest_alias(self.folder)

    def complete(self, newest: Path, best: int | None) -> None:
        """Set the alias `best` and prune, if a kill came between the last save and that.

        Args:
            newest: the checkpoint that was saved last, whose every byte was compared; nothing is
                done if there is a later one.
            best: step of the best evaluation; None: there is no alias.
        """
        self._ranks.reduce(lambda: None, lambda _: self._complete(newest, best))

    def _complete(self, newest: Path, best: int | None) -> None:
        # A later one may be damaged, and would yet count as one that stays.
        if newest not in retention.list_checkpoints(self.folder)[-1:]:
            return
        if best is not None:
            retention.restore_best_alias(self.folder, best, retention.parse_step(newest))
        self._prune()

    def _make_ready(self) -> None:
        """Finish what a killed run left behind, write a file, and look at the free space."""
        _make_ready(self.folder)
        if self._names_latest:
            retention.restore_latest_alias(self.folder)

    def _wait(self) -> None:
        """Wait for the save in flight and keep its failure for `poll`."""
        if self._in_flight is not None:
            self._failure = self._in_flight.exception() or self._failure
            self._in_flight = None

    def _commit(
        self,
        state: Mapping[str, Tensor],
        info: SaveInfo,
        aliases: Sequence[str],
        staging: Staging | None,
    ) -> None:
        """Do one save, in this thread or in the background."""
        try:
            commit(
                state,
                info,
                folder=self.folder,
                aliases=aliases,
                prune=self._prune,
                ranks=self._ranks,
                writer=self._writer,
                staging=staging,
            )
        finally:
            # Also after a failure: `wait_staged` must not wait for a copy that will never be made.
            if staging is not None:
                staging.done.set()


def _make_ready(folder: Path) -> None:
    """Clear what a killed run left behind, write a file, and look at the free space."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for why in retention.clear_leftovers(folder):
            retention.warn_once(why)
        # Permissions do not tell: a read-only mount and a quota refuse only when written to.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"probe")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write checkpoints to {folder}: {error.strerror}",
            "set run.dir to a folder that you may write to",
        ) from error
    saved = retention.list_checkpoints(folder)
    # The next save needs as much as the last one, and twice that while the last is still kept.
    needed, free = _size_of(saved[-1]) if saved else 0, free_bytes(folder)
    if free < needed:
        raise EnvironmentFault(
            f"no space for a checkpoint: the last one has {needed:,} bytes, "
            f"{free:,} are free in {folder}",
            f"`trainer checkpoint prune {folder} --keep 1` deletes older and abandoned ones; or "
            "set run.dir to another disk",
        )
    if free < 2 * needed:
        log.warning("%s has space for one more checkpoint only (%s bytes)", folder, f"{free:,}")


def _size_of(checkpoint: Path) -> int:
    try:
        return read_manifest(checkpoint).bytes
    except CheckpointError:
        return 0
