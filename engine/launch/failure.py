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
    """How a rank ended by itself.

    Attributes:
        number: its rank.
        code: its exit code, or a signal's number with a minus.
        log: its log.
        log_start: where the log of this attempt begins.
        beat: its newest report, if there is one.
    """

    number: int
    code: int
    log: Path
    log_start: int
    beat: Beat | None

    @property
    def is_consequence(self) -> bool:
        """Whether it ended because of another rank."""
        return self.code > 0 and self.beat is not None and self.beat.ended in CONSEQUENCES


@dataclass(frozen=True)
class Cause:
    """Why a job failed.

    Attributes:
        code: the exit code of the job.
        sentence: which rank failed first, and how.
        details: more lines for the screen: the end of a log.
        rank: the rank that failed first; None: the job hung.
    """

    code: int
    sentence: str
    details: Sequence[str] = ()
    rank: int | None = None

    def render(self) -> str:
        """Return what the launcher prints."""
        return "\n".join([self.sentence, *(f"  {line}" for line in self.details)])


def find_cause(ends: Sequence[RankEnd], beats: Sequence[Beat], *, whole_tail: bool) -> Cause:
    """Return why a job failed.

    A rank that died by a signal is the cause, however the others ended; then the first that failed
    of something else than a lost connection; then, of ranks that all waited, the one that the
    others waited for. SIGABRT comes last: NCCL aborts the ranks that lost another one.

    Args:
        ends: of the ranks that ended by themselves, in the order in which that was noticed.
        beats: the newest reports of all ranks of this attempt.
        whole_tail: show all of the last lines of a log, tracebacks too.
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
    if cause.number or cause.code < 0:  # what rank 0 said is on the screen
        details = [f"the end of {cause.log}:", *_tail(cause, whole_tail=whole_tail)]
    return Cause(max(cause.code, ExitCode.FAILED), sentence, details, cause.number)


def _is_late(behind: Beat, ends: Sequence[RankEnd]) -> bool:
    """Return whether a rank had not ended when the others gave up, or says itself that it hung."""
    return behind.ended == "hang" or behind.rank not in {end.number for end in ends}


def _order(end: RankEnd) -> tuple[bool, bool, bool, float]:
    killed = end.code < 0 and end.code != -signal.SIGABRT
    failed_at = end.beat.written if end.beat and end.beat.ended == "error" else 0.0
    # Without a report, an error that we foresaw explains the lost connections that follow from it.
    unexplained = end.beat is None and end.code not in OWN_CODES
    return not killed, end.code == -signal.SIGABRT, unexplained, failed_at


def _explain(end: RankEnd) -> str:
    """Return how a rank ended, and where it was."""
    where = f", {end.beat.where}" if end.beat else ""
    if end.code < 0:
        text = f"rank {end.number} was killed by {signal.Signals(-end.code).name}{where}"
        is_kill = -end.code == signal.SIGKILL
        return f"{text}; if nobody did that, the machine ran out of memory" if is_kill else text
    text = f"rank {end.number} ended with exit code {end.code}{where}"
    return f"{text}: {end.beat.reason}" if end.beat and end.beat.reason else text


def _tail(end: RankEnd, *, whole_tail: bool) -> list[str]:
    """Return the last lines of a log; from its last message on, unless all is asked for."""
    try:
        with end.log.open("rb") as file:
            file.seek(max(end.log_start, end.log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []
    messages = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    return lines[messages[-1] :] if messages and not whole_tail and end.code > 0 else lines


class Restarts:
    """How often a job is started again, counted since its last progress.

    Args:
        limit: how many restarts without progress are allowed.
        newest_step: returns the step of the newest complete checkpoint, None if there is none.
        resume_arguments: added to the command once the job has saved a checkpoint, so that it
            resumes from that whatever the recipe says.

    Attributes:
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
        """Return what to add to the command of the next attempt."""
        return list(self._resume_arguments) if self._has_saved else []

    def allow(self) -> bool:
        """Return whether a job that just failed may be started again, and count that."""
        step = self._newest_step()
        if step != self._step:
            self._step, self._has_saved, self.count = step, True, 0
        if self.count >= self.limit:
            return False
        self.count += 1
        return True
