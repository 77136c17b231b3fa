"""state.json: how the newest attempt at a run started and ended. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from .errors import Stopped
from .files import atomic_write, read_regular
from .text.display import redact

FILE = "state.json"
LONGEST_REASON = 500
Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(kw_only=True)
class RunState:
    """One attempt; the file holds the newest."""

    __pydantic_config__ = ConfigDict(defer_build=True)

    total_steps: Count
    """steps of the whole run; 0 if the attempt failed before they were known"""
    start_step: Count = 0
    """step after which this attempt resumed; 0 if it started the run"""
    attempt: Count = 0
    run_id: str = ""
    """code and recipe of the attempt"""
    world: Count = 1
    device: str = ""
    started_at: str = ""
    ended_at: str = ""
    outcome: str = ""
    """"finished", "stopped" or "failed"; empty while it runs, and for good if it was killed"""
    reason: str = ""
    """type and message of the error, if the attempt failed"""
    warnings: list[str] = field(default_factory=list)
    """what is wrong with a run that ended well otherwise"""


_TYPE = TypeAdapter(RunState)


@contextmanager
def record_attempt(state: RunState, folder: Path | None) -> Iterator[RunState]:
    """Keep state.json up to date around a training loop that sets `state.outcome`.

    Args:
        folder: the run directory; None on all ranks but one.
    """
    state.started_at = _now()
    _write(state, folder)
    try:
        yield state
    except Stopped:
        state.outcome = "stopped"
        raise
    except BaseException as error:
        _fail(state, error)
        raise
    finally:
        state.ended_at = _now()
        _write(state, folder)


@contextmanager
def record_early_failure(folder: Path) -> Iterator[None]:
    """Write state.json for a run that ends before it trains, unless one is there."""
    try:
        yield
    except (Exception, Stopped) as error:
        # A file that is there belongs to an earlier attempt, whose outcome is worth more.
        if not (folder / FILE).exists():
            state = RunState(total_steps=0, started_at=_now(), ended_at=_now(), outcome="stopped")
            if not isinstance(error, Stopped):
                _fail(state, error)
            _write(state, folder)
        raise


def record_failure(folder: Path, reason: str) -> None:
    """Write why the newest attempt failed, for a process that died or does not know the cause.

    An attempt that has finished or saved keeps its outcome.
    """
    # The process that died may have written nothing.
    state = read_state(folder) or RunState(total_steps=0, started_at=_now())
    # Before it trains, rank 0 is stopped because another rank failed: that is no outcome.
    is_early = state.outcome == "stopped" and not state.total_steps
    if state.outcome in ("", "failed") or is_early:
        state.outcome, state.reason = "failed", reason[:LONGEST_REASON]
        state.ended_at = state.ended_at or _now()
        _write(state, folder)


def record_stop(folder: Path) -> None:
    """Write that the newest attempt was stopped, unless its outcome is known already."""
    state = read_state(folder)
    if state is not None and not state.outcome:
        state.outcome, state.ended_at = "stopped", _now()
        _write(state, folder)


def _fail(state: RunState, error: BaseException) -> None:
    state.outcome = "failed"
    state.reason = redact(f"{type(error).__name__}: {error}")[:LONGEST_REASON]


def read_state(folder: Path) -> RunState | None:
    """Return what the newest attempt said; None: nothing that can be read."""
    try:
        return _TYPE.validate_json(read_regular(folder / FILE))
    except (OSError, ValidationError):
        return None


def _write(state: RunState, folder: Path | None) -> None:
    """Write the file; a full disk must not end a run for it."""
    if folder is not None:
        with suppress(OSError):
            atomic_write(folder / FILE, json.dumps(asdict(state), indent=1) + "\n")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
