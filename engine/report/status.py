"""Reads the status of a run from the files of its run directory. Torch-free."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.manifest import MANIFEST
from ..checkpoint.retention import list_checkpoints, parse_step
from ..core.errors import RecipeError, nearest
from ..core.files import open_regular
from ..core.heartbeat import furthest_behind, read_beats
from ..core.run_dir import RunDirectory, read_recipe
from ..core.run_state import RunState, read_state
from ..core.text.display import make_printable
from ..observe.metrics import LARGEST_STEP, VALIDATION, decode_rows, read_events

TAIL_BYTES = 2**18
HUNG_SECONDS = 60.0
HUNG_ROWS = 10
"""a run counts as hung after this many times the median interval between rows of metrics"""
LOW_DISK = 0.05
PATH_PARTS = 2
"""folders between run.dir and a run directory: run.experiment and run.lineage"""

State = Literal["running", "finished", "stopped", "failed", "died"]


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run at this moment. A field is None if the run's files do not tell it."""

    run: str
    state: State
    holder: str = ""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    """training losses of the newest rows of metrics.jsonl, oldest first"""
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    eval_step: int | None = None
    eval_loss: float | None = None
    eval_bits_per_byte: float | None = None
    checkpoint_step: int | None = None
    checkpoint_age_seconds: float | None = None
    last_sign_seconds: float | None = None
    """seconds since the run last wrote metrics, state, lock or checkpoint"""
    attempts: int = 1
    disk_bytes: int = 0
    reason: str = ""
    behind: str = ""
    """the rank that is furthest behind, its position and time, if the run is running or died"""
    events: int = 0
    """number of events, such as loss spikes, in events.jsonl"""
    newest_event: str = ""
    """id of the newest event"""
    warnings: list[str] = field(default_factory=list)


def find_runs(paths: list[Path]) -> list[Path]:
    """Return the run directories that paths name.

    Args:
        paths: run directories, or folders that contain run directories, also those of experiments
            and lineages.

    Raises:
        RecipeError: a path neither is a run directory nor contains one.
    """
    runs: list[Path] = []
    for path in paths:
        inner = [path] if is_run(path) else sorted(_runs_below(path, PATH_PARTS))
        if not inner:
            known = [each.name for each in _folders(path.parent) if is_run(each)]
            what = "has no metrics.jsonl" if path.exists() else "does not exist"
            hint = nearest(path.name, known) or "a run directory is what [run] says: {dir}/{name}"
            raise RecipeError(f"no run: {make_printable(str(path))} {what}", hint)
        runs += inner
    return list(dict.fromkeys(runs))


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    """Yield the run directories in a folder, and in folders of folders; sweeps have their own."""
    for each in _folders(path):
        if is_run(each):
            yield each
        elif depth and not (each / "sweep.json").is_file():
            yield from _runs_below(each, depth - 1)


def is_run(path: Path) -> bool:
    """Return whether a run has been started in this folder."""
    return (path / "metrics.jsonl").is_file() or (path / ".lock").is_file()


def examine(path: Path, now: float | None = None) -> RunStatus:
    """Read the status of a run from its run directory.

    Args:
        path: the run directory.
        now: the current time in seconds since the epoch; None takes the clock.
    """
    now = time.time() if now is None else now
    holder = RunDirectory(path).holder()
    record, rows = read_state(path), list(newest_rows(path))
    events = list(read_events(path))
    train = [row for row in rows if row.get("kind") in ("train", "round")]
    evals = [row for row in rows if row.get("kind") == "eval"]
    # The validation split stands for the run where there are several.
    evals = [row for row in evals if row.get("split", VALIDATION) == VALIDATION] or evals
    checkpoints = [
        each for each in list_checkpoints(path / "checkpoints") if (each / MANIFEST).is_file()
    ]
    saved = parse_step(checkpoints[-1]) if checkpoints else None
    last: Mapping[str, Any] = train[-1] if train else {}
    total = record.total_steps or None if record else _steps_of(read_recipe(path))
    state = _state(holder, record, int(last.get("step", 0)), total, saved)
    step = max(int(last.get("step", 0)), 0 if state == "running" else saved or 0)
    seconds = number(last.get("step_seconds"))
    signs = [path / name for name in ("metrics.jsonl", "state.json", ".lock")]
    ages = [_age(each, now) for each in (*signs, *checkpoints[-1:])]
    quiet = min((age for age in ages if age is not None), default=None)
    left = total - step if total is not None else None
    eta = left * seconds if state == "running" and left is not None and seconds else None
    status = RunStatus(
        run=str(path),
        state=state,
        holder=holder,
        step=step,
        total_steps=total,
        loss=number(last.get("loss")),
        losses=[loss for row in train if (loss := number(row.get("loss"))) is not None],
        tokens_per_second=number(last.get("tokens_per_second")),
        eta_seconds=eta,
        eval_step=evals[-1]["step"] if evals else None,
        eval_loss=number(evals[-1].get("loss")) if evals else None,
        eval_bits_per_byte=number(evals[-1].get("bits_per_byte")) if evals else None,
        checkpoint_step=saved,
        checkpoint_age_seconds=_age(checkpoints[-1] / MANIFEST, now) if checkpoints else None,
        last_sign_seconds=quiet,
        attempts=record.attempt + 1 if record else 1,
        disk_bytes=disk_bytes(path),
        reason=record.reason if record and state == "failed" else "",
        behind=_behind(path, record, now) if state in ("running", "died") else "",
        events=len(events),
        newest_event=events[-1]["id"] if events else "",
    )
    status.warnings.extend(record.warnings if record and not holder else [])
    status.warnings.extend(_warnings(status, train, path))
    return status


def newest_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in the last `TAIL_BYTES` of metrics.jsonl."""
    try:
        with open_regular(path / "metrics.jsonl") as file:
            start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(start)
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return
    yield from decode_rows(text[text.find("\n") + 1 :] if start else text)


def number(value: Any) -> float | None:
    """Return a JSON number as a float, or None for a value of another type."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def disk_bytes(path: Path) -> int:
    """Return the bytes that the files of a run occupy on the disk, sparse files by their blocks."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total


def _state(
    holder: str, record: RunState | None, step: int, total: int | None, saved: int | None
) -> State:
    if holder:
        return "running"
    if record is not None and record.outcome in ("finished", "stopped", "failed"):
        return record.outcome  # type: ignore[return-value]
    if record is not None:
        return "died"
    if total is not None and step >= total:
        return "finished"
    return "stopped" if saved is not None and saved >= step else "died"


def _behind(path: Path, record: RunState | None, now: float) -> str:
    """Describe the rank of the newest attempt that is furthest behind, or return an empty text."""
    world = record.world if record else LARGEST_STEP
    behind = furthest_behind(beat for beat in read_beats(path / "logs") if beat.rank < world)
    return behind.describe(now) if behind else ""


def _warnings(status: RunStatus, train: list[dict[str, Any]], path: Path) -> Iterator[str]:
    times = [time for row in train if (time := number(row.get("time"))) is not None]
    usual = sorted(b - a for a, b in pairwise(times))
    limit = max(HUNG_SECONDS, HUNG_ROWS * (usual[len(usual) // 2] if usual else 0.0))
    if status.state == "running" and (status.last_sign_seconds or 0) > limit:
        yield f"no progress for {clock(status.last_sign_seconds or 0)}: it looks hung"
    if status.loss is not None and not math.isfinite(status.loss):
        yield f"the loss is {json.dumps(status.loss)}"
    usage = shutil.disk_usage(path)
    if status.state == "running" and usage.free < LOW_DISK * usage.total:
        yield f"the disk is nearly full: {usage.free / 2**30:.1f} GiB free"


def clock(seconds: float) -> str:
    """Format a duration with one unit: `42 s`, `5 min`, `3.5 h`, `2.1 days`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} days"


def _steps_of(recipe: Mapping[str, Any]) -> int | None:
    run = recipe.get("run")
    steps = run.get("steps") if isinstance(run, dict) else None
    return steps if isinstance(steps, int) and 0 <= steps < LARGEST_STEP else None


def _age(path: Path, now: float) -> float | None:
    try:
        return max(0.0, now - path.stat().st_mtime)
    except OSError:
        return None


def _folders(path: Path) -> list[Path]:
    try:
        return [each for each in path.iterdir() if each.is_dir()]
    except OSError:
        return []
