"""Errors that a user can act on, each with the exit code of the public contract."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum


class ExitCode(IntEnum):
    """What the process tells its caller; schedulers act on these numbers."""

    DONE = 0
    FAILED = 1
    RECIPE = 2
    ENVIRONMENT = 3
    DATA = 4
    CHECKPOINT = 5
    DIVERGED = 6
    IN_USE = 7
    STOPPED_AND_SAVED = 75
    INTERRUPTED = 130


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
        return f"error: {self.message}" + (f"\n  hint: {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe, and where it stands."""

    message: str
    key: str = ""
    file: str = ""
    line: int = 0
    column: int = 0
    hint: str = ""

    def render(self) -> str:
        """Return `file:line:column: key: message; hint`."""
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        text = ": ".join(part for part in (place, self.key, self.message) if part)
        return f"error: {text}" + (f"; {self.hint}" if self.hint else "")


class RecipeError(TrainerError):
    """Everything that is wrong with a recipe or a command line, reported at once."""

    exit_code = ExitCode.RECIPE

    def __init__(self, problems: Sequence[Problem] | str, hint: str = "") -> None:
        if isinstance(problems, str):
            problems = [Problem(problems, hint=hint)]
        super().__init__("\n".join(problem.message for problem in problems))
        self.problems = list(problems)

    def render(self) -> str:
        """Return one line a problem."""
        return "\n".join(problem.render() for problem in self.problems)


class EnvironmentFault(TrainerError):
    """The machine lacks something: a device, a port, a writable folder, a package."""

    exit_code = ExitCode.ENVIRONMENT


class DataError(TrainerError):
    """A source cannot be read; the message names file and line."""

    exit_code = ExitCode.DATA


class CheckpointError(TrainerError):
    """No checkpoint is intact, or the one given does not fit."""

    exit_code = ExitCode.CHECKPOINT


class Diverged(TrainerError):
    """The loss or the gradient is not finite and the policy says to stop."""

    exit_code = ExitCode.DIVERGED


class RunInUse(TrainerError):
    """Another process trains in this run directory."""

    exit_code = ExitCode.IN_USE


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `did you mean "x"?` for the closest known spelling, or an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f'did you mean "{close[0]}"?' if close else ""
