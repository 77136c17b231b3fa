"""Which rank made a job fail, and whether the job is started again. Torch-free."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import ExitCode
from ..core.heartbeat import Beat, furthest_behind
from .watchdog import explain_hang

TAIL_LINES = 30
TAIL_BYTES = 2**16
OWN_CODES = range(ExitCode.RECIPE, ExitCode.IN_USE + 1)
CONSEQUENCES = ("lost contact", "hang")


@dataclass
class RankEnd:
    """The end of a rank that the launcher did not cause.

    Attributes:
        number: number of the rank.
        code: exit code, or the negative number of a signal.
        log: path of the rank's log.
        log_start: offset in the log at which this attempt begins.
        beat: the newest report of the rank, if there is one.
    """

    number: int
    code: int
    log: Path
    log_start: int
    beat: Beat | None

    @property
    def is_consequence(self) -> bool:
        """Whether the rank ended because of another one."""
        return self.code > 0 and self.beat is not None and self.beat.ended in CONSEQUENCES


@dataclass(frozen=True)
class Cause:
    """Why a job failed.

    Attributes:
        code: the exit code of the job.
        sentence: says which rank failed first, and how.
        details: further lines for the screen: the end of a log.
        rank: the rank that failed first; None if the job hung.
    """

    code: int
    sentence: str
    details: Sequence[str] = ()
    rank: int | None = None


def find_cause(ends: Sequence[RankEnd], beats: Sequence[Beat], *, whole_tail: bool) -> Cause:
    """Return why a job failed.

    The first of these is the cause: a rank that was killed by a signal; the first rank with an
    error other than a lost connection; the rank that all others waited for. SIGABRT comes last:
    NCCL aborts the ranks that have lost another one.

    Args:
        ends: the ranks that ended by themselves, in the order in which that was noticed.
        beats: the newest reports of all ranks of this attempt.
        whole_tail: whether to show all of the last lines of a log, with tracebacks.
    """
    causes = sorted((end for end in ends if not end.is_consequence), key=_order)
    behind = furthest_behind(beats)
    is_late = behind is not None and _is_late(behind, ends)
    if behind and is_late and not causes:
        return Cause(ExitCode.FAILED, explain_hang(behind.describe(time.time()), ends[0].log))
    cause = causes[0] if causes else ends[0]
    sentence = _explain(cause)
    if behind and is_late and cause.code == -signal.SIGABRT:
        sentence += f"; the furthest behind is {behind.describe(time.time())}"
    details = []
    if cause.number or cause.code < 0:  # the output of rank 0 is on the screen already
        details = [f"the end of {cause.log}:", *_tail(cause, whole_tail=whole_tail)]
    return Cause(max(cause.code, ExitCode.FAILED), sentence, details, cause.number)


def _is_late(behind: Beat, ends: Sequence[RankEnd]) -> bool:
    """Return whether a rank had not ended when the others gave up, or reported that it hung."""
    return behind.ended == "hang" or behind.rank not in {end.number for end in ends}


def _order(end: RankEnd) -> tuple[bool, bool, bool, float]:
    """Return a sort key that puts the likeliest cause of the failure first."""
    killed = end.code < 0 and end.code != -signal.SIGABRT
    failed_at = end.beat.written if end.beat and end.beat.ended == "error" else 0.0
    # Without a report, a known exit code explains the lost connections that follow from it.
    unexplained = end.beat is None and end.code not in OWN_CODES
    return not killed, end.code == -signal.SIGABRT, unexplained, failed_at


def _explain(end: RankEnd) -> str:
    """Say how a rank ended, and in which phase."""
    where = f", {end.beat.where}" if end.beat else ""
    if end.code < 0:
        text = f"rank {end.number} was killed by {signal.Signals(-end.code).name}{where}"
        is_kill = -end.code == signal.SIGKILL
        return (
            f"{text}; unless someone did that, the machine ran out of memory" if is_kill else text
        )
    text = f"rank {end.number} ended with exit code {end.code}{where}"
    return f"{text}: {end.beat.reason}" if end.beat and end.beat.reason else text


def _tail(end: RankEnd, *, whole_tail: bool) -> list[str]:
    """Return the last lines of a log, from the last error message if `whole_tail` is False."""
    try:
        with end.log.open("rb") as file:
            # Attempts append to one log: what earlier ones wrote is not about this failure.
            file.seek(max(end.log_start, end.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []
    messages = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    return lines[messages[-1] :] if messages and not whole_tail and end.code > 0 else lines


class Restarts:
    """Counts the restarts of a job since its last progress.

    Args:
        limit: number of restarts without progress that are allowed.
        newest_step: returns the step of the newest complete checkpoint, None if there is none.
        resume_arguments: added to the command after the job has saved a checkpoint, so that the
            job resumes from it whatever the recipe says.

    Attributes:
        limit: number of restarts without progress that are allowed.
        count: restarts since the last progress.
    """

    def __init__(
        self,
        limit: int,
        newest_step: Callable[[], int | None] = lambda: None,
        resume_arguments: Sequence[str] = (),
    ) -> None:
        self.limit = limit
        self.count = 0
        self._newest_step = newest_step
        self._resume_arguments = resume_arguments
        self._step = newest_step()
        self._has_saved = False

    def arguments(self) -> list[str]:
        """Return the arguments that the next attempt adds to the command."""
        return list(self._resume_arguments) if self._has_saved else []

    def allow(self) -> bool:
        """Return whether a job that has failed may be started again, and count the restart."""
        step = self._newest_step()
        # A new checkpoint is progress: the limit is for a job that fails over and over without one.
        if step != self._step:
            self._step, self._has_saved, self.count = step, True, 0
        if self.count >= self.limit:
            return False
        self.count += 1
        return True
