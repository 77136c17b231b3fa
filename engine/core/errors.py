"""Errors that a user can act on, each with the exit code of the public contract."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from typing import Self

from .text.display import make_lines_printable


class ExitCode(IntEnum):
    """Exit codes of the process, which schedulers act on."""

    DONE = 0, "done"
    FAILED = 1, "failed in a way we did not foresee; `--traceback` shows where"
    RECIPE = 2, "the recipe or the command line is wrong"
    ENVIRONMENT = 3, "the machine lacks something: a device, a port, a package, a writable folder"
    DATA = 4, "a data source cannot be read; file and line are named"
    CHECKPOINT = 5, "no checkpoint is intact, the one given does not fit, or the last save failed"
    DIVERGED = (
        6,
        "training diverged: the loss, the gradient or a weight is not finite, or spikes last",
    )
    IN_USE = 7, "another run uses this run directory"
    DIFFERENT = 8, "`trainer check-plan` found that a plan does not compute what one process does"
    STOPPED_AND_SAVED = (
        75,
        "stopped by a signal, and a complete checkpoint stands: the same command resumes",
    )
    INTERRUPTED = 130, "interrupted by a signal before there was a checkpoint, or by a second one"

    meaning: str

    def __new__(cls, code: int, meaning: str = "") -> Self:
        """Make a member from a number and the sentence that explains it."""
        # An integer, so that a member can be given to `sys.exit` as it is.
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


class TrainerError(Exception):
    """An error foreseen by us: printed without a traceback.

    Args:
        message: what went wrong, with both values where two disagree.
        hint: what to do about it.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def render(self) -> str:
        """Return the text that the command line prints."""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return make_lines_printable(f"error: {self.message}{hint}")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe, and where it stands."""

    message: str
    key: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    hint: str = ""

    def describe(self) -> str:
        """Return `file:line:column: key: message; hint`."""
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        text = ": ".join(part for part in (place, self.key, self.message) if part)
        return make_lines_printable(text + (f"; {self.hint}" if self.hint else ""))

    def render(self) -> str:
        """Return the line that a command prints: `error: ` and the description."""
        return f"error: {self.describe()}"


class RecipeError(TrainerError):
    """Everything that is wrong with a recipe or a command line, reported at once."""

    exit_code = ExitCode.RECIPE

    def __init__(self, problems: Sequence[Problem] | str, hint: str = "") -> None:
        if isinstance(problems, str):
            problems = [Problem(problems, hint=hint)]
        super().__init__("\n".join(problem.message for problem in problems))
        self.problems = list(problems)

    def __str__(self) -> str:
        """Return one line a problem, each with file, line, key and hint."""
        return "\n".join(problem.describe() for problem in self.problems)

    def render(self) -> str:
        """Return one line a problem, as a command prints it."""
        return "\n".join(problem.render() for problem in self.problems)


class EnvironmentFault(TrainerError):
    """The machine lacks something: a device, a port, a writable folder, a package."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(TrainerError):
    """A source cannot be read; the message names file and line."""

    exit_code = ExitCode.DATA


class CheckpointError(TrainerError):
    """No checkpoint is intact, the one given does not fit, or one could not be written."""

    exit_code = ExitCode.CHECKPOINT


class LostContact(TrainerError):
    """Another rank died or hangs; that rank's own message says why."""

    @classmethod
    def by(cls, rank: int, error: BaseException) -> Self:
        """Return the error of a rank whose collective failed."""
        text = (str(error) or type(error).__name__).splitlines()[0]
        return cls(
            f"rank {rank} lost contact with another rank: {text}",
            "the rank that failed first says why; see the launcher's output and logs/",
        )


class Diverged(TrainerError):
    """The loss, the gradient or a weight is not finite, or spikes last, and training stops."""

    exit_code = ExitCode.DIVERGED


class RunInUse(TrainerError):
    """Another process trains in this run directory."""

    exit_code = ExitCode.IN_USE


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean "x"?` for the closest known spelling, or an empty string.

    Case does not count. A word that is far from all gets none: a wrong suggestion misleads.
    """
    word, spellings = word.lower(), {name.lower(): name for name in known}
    begins = [name for name in spellings if len(word) > 2 and name.startswith(word)]
    close = get_close_matches(word, begins or spellings, n=1, cutoff=0 if begins else 0.65)
    return f'did you mean "{spellings[close[0]]}"?' if close else ""


class Stopped(SystemExit):
    """Raised in the main thread to end this process at once, because nothing can be lost."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(int(code))
        self.exit_code = code
