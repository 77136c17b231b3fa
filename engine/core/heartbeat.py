"""What each rank of a run is doing: kept in memory, and in a small file of the run directory.

The main thread only assigns to memory when a phase begins or ends. A thread of the watchdog copies
that to `logs/heartbeat-N.json` now and then, so that a shared file system sees few writes.
Torch-free.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from . import faults
from .errors import LostContact
from .files import open_regular
from .text.display import redact

BYTES = 2048
LONGEST_REASON = 300
STALE_INTERVALS = 5
UNTIMED = ("start", "rendezvous", "assemble", "resume", "export", "tasks", "quorum")
"""phases that may take as long as they need: they tokenise, load and write whole models, prepare
the questions of tasks, and wait for other replica groups"""

Ended = Literal["", "done", "error", "lost contact", "hang"]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, Field(max_length=LONGEST_REASON, pattern=r"^[ -~]*$")]


@dataclass(frozen=True, kw_only=True)
class Beat:
    """The newest report of one rank."""

    __pydantic_config__ = ConfigDict(defer_build=True)

    rank: Count
    attempt: Count
    pid: Count
    host: Text
    step: Count
    """the optimizer step it is in, counted from 1; 0 before the first"""
    phase: Text
    progress: Count
    """phases begun and ended so far: ranks that work in step have the same number"""
    since: Seconds
    """when it last made progress, seconds since 1970"""
    written: Seconds
    """when this report was written"""
    interval: Seconds
    """seconds between two reports"""
    ended: Ended = ""
    """how the rank ended; "lost contact" is the consequence of another rank's end"""
    reason: Text = ""
    """type and message of the error that ended the rank"""

    @property
    def where(self) -> str:
        """The step and the phase of the newest report, in words."""
        return f"last seen in step {self.step}, {self.phase}" if self.step else f"in {self.phase}"

    def describe(self, now: float) -> str:
        """Return which rank this is, what it does, and for how long it has made no progress."""
        who = f"rank {self.rank} (process {self.pid} on {self.host})"
        return f"{who} {self.where}, no progress for {max(0.0, now - self.since):.0f} s"


_TYPE = TypeAdapter(Beat)


class State(NamedTuple):
    """What the main thread is doing."""

    progress: int
    step: int
    phase: str
    since: float
    """seconds since 1970"""
    mark: float
    """differs whenever there was progress"""

    @property
    def where(self) -> str:
        """The step and the phase, or the phase alone before the first step."""
        return f"step {self.step}, {self.phase}" if self.step else self.phase


class Heartbeat:
    """The progress of this process's main thread.

    Attributes:
        state: replaced as a whole, so that another thread reads one that is consistent.
        seconds: time spent in each phase since it was last cleared.
        timed: whether a lack of progress means that this rank hangs. It does not before the first
            step is done: the model is assembled and compiled until then.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, rank: int) -> None:
        """Reset all state, because a run begins in this process."""
        self._rank = rank
        self._has_faults = "TRAINER_FAULT" in os.environ  # asked once: a step has many phases
        self._thread = threading.get_ident()
        self._has_stepped = False
        self.seconds: dict[str, float] = {}
        self.state = State(0, 0, "start", time.time(), time.monotonic())

    @property
    def timed(self) -> bool:
        """Whether this rank must make progress within the time limit."""
        return self._has_stepped and self.state.phase not in UNTIMED

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context around a phase, which reports that it begins and ends."""
        return _Phase(self, name)

    def enter(self, name: str) -> None:
        """Report that a phase begins that lasts until the next one; tests make it fail there."""
        self.report(name)
        if self._has_faults:
            faults.point(f"phase.{name}", self._rank, self.state.step)

    def touch(self) -> None:
        """Report progress inside a phase, of which ranks may make different amounts.

        Threads other than the main thread only count where they write a checkpoint: the main thread
        may be waiting for them.
        """
        if self._thread == threading.get_ident() or self.state.phase == "checkpoint":
            self.state = self.state._replace(since=time.time(), mark=time.monotonic())

    def begin_step(self, step: int) -> None:
        """Report that an optimizer step begins, counted from 1."""
        # The step before this one is over, and with it compilation.
        self._has_stepped |= self.state.step > 0
        self.state = self.state._replace(step=step)
        self.enter("step")

    def report(self, phase: str) -> None:
        """Replace the current phase."""
        progress, step = self.state.progress + 1, self.state.step
        self.state = State(progress, step, phase, time.time(), time.monotonic())


class _Phase(AbstractContextManager[None]):
    """Written out, and not a generator, because a step has a dozen of them."""

    __slots__ = ("_heartbeat", "_name", "_outer", "_start")

    def __init__(self, heartbeat: Heartbeat, name: str) -> None:
        self._heartbeat, self._name = heartbeat, name

    def __enter__(self) -> None:
        self._outer, self._start = self._heartbeat.state.phase, time.monotonic()
        self._heartbeat.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        seconds, name = self._heartbeat.seconds, self._name
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - self._start
        if kind is None:  # else the phase that failed stays, for the report
            self._heartbeat.report(self._outer)


heartbeat = Heartbeat()
"""the progress of this process"""


class BeatFile:
    """Writes the reports of one rank; each one replaces the one before.

    Args:
        folder: the run's `logs`.
        interval: seconds between two reports.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, rank: int, attempt: int, interval: float) -> None:
        self._rank, self._attempt, self._interval = rank, attempt, interval
        self._host = _plain(os.uname().nodename)
        self._lock = threading.Lock()
        self._ended = False
        # Not truncated: a reader must find the old report until the new one replaces it.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(folder / f"heartbeat-{rank}.json", flags, 0o644)
        self.write()

    def write(self, ended: Ended = "", reason: str = "") -> None:
        """Write what the main thread is doing, or how this rank ended; only the first end counts.

        A full disk must not end a run for it.
        """
        with self._lock, suppress(OSError):
            if self._ended:
                return
            self._ended = bool(ended)
            state = heartbeat.state
            beat = Beat(
                rank=self._rank,
                attempt=self._attempt,
                pid=os.getpid(),
                host=self._host,
                step=state.step,
                phase=state.phase,
                progress=state.progress,
                since=state.since,
                written=time.time(),
                interval=self._interval,
                ended=ended,
                reason=_plain(redact(reason)),
            )
            # One write of a fixed size: readers never see a part of it.
            os.pwrite(self._file, json.dumps(asdict(beat)).encode().ljust(BYTES), 0)

    def end(self, error: BaseException | None) -> None:
        """Write how this rank ended, and close the file."""
        if error is None:
            self.write("done")
        else:
            lost = isinstance(error, LostContact)
            self.write("lost contact" if lost else "error", f"{type(error).__name__}: {error}")
        os.close(self._file)


def _plain(text: str) -> str:
    """Return a text that is short and safe for a terminal."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:LONGEST_REASON]


def read_beats(folder: Path) -> list[Beat]:
    """Return the newest report of each rank, in the order of the ranks; none where none is.

    Args:
        folder: the run's `logs`; what is in it need not be ours.
    """
    beats = []
    with suppress(OSError):
        for entry in os.listdir(folder):
            match = re.fullmatch(r"heartbeat-(\d{1,7})\.json", entry)
            beat = _read(folder / entry) if match else None
            if match and beat and beat.rank == int(match[1]):
                beats.append(beat)
    return sorted(beats, key=lambda beat: beat.rank)


def _read(path: Path) -> Beat | None:
    try:
        with open_regular(path) as file:
            return _TYPE.validate_json(file.read(BYTES))
    except (OSError, ValidationError):
        return None


def furthest_behind(beats: Iterable[Beat]) -> Beat | None:
    """Return the rank that the others wait for; None if no rank is running.

    Healthy ranks wait in a collective, which the rank at fault has not reached. First comes a rank
    whose reports have stopped, because its process is stopped, dead or blocked as a whole; then the
    one that began and ended the fewest phases; then the one whose last progress is the oldest.
    """
    running = [beat for beat in beats if beat.ended in ("", "hang")]
    if not running:
        return None
    newest = max(beat.written for beat in running)
    silent = [b for b in running if newest - b.written > STALE_INTERVALS * b.interval]
    if silent:
        return min(silent, key=lambda beat: beat.written)
    return min(running, key=lambda beat: (beat.progress, beat.since))


def first_failure(beats: Iterable[Beat]) -> Beat | None:
    """Return the rank that failed first of something that is not another rank's end."""
    failed = [beat for beat in beats if beat.ended == "error"]
    return min(failed, key=lambda beat: beat.written, default=None)
