"""Runs the points of a sweep, one after another, each as processes of its own. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..core.errors import ExitCode
from ..core.run_state import record_failure
from ..launch.child import trainer_command
from ..launch.local import Signals, launch
from ..recipe.load import Loaded
from .folder import Sweep
from .points import Point


def run_points(
    sweep: Sweep,
    recipes: Sequence[Loaded],
    nproc: int,
    *,
    go_on: bool,
    say: Callable[[str], None],
) -> int:
    """Run every point that has not finished.

    A signal is passed on to the run at work, which saves; no other one is started then.

    Args:
        recipes: of the points, in their order.
        nproc: ranks of each run.
        go_on: start the next run also when one has failed.

    Returns:
        the exit code of the run that was stopped, or of the first that failed, else 0.
    """
    failed: list[int] = []
    with Signals() as signals:
        for number, (point, loaded) in enumerate(zip(sweep.points, recipes, strict=True), 1):
            place = f"[{number}/{len(sweep.points)}] {point.name}"
            if sweep.is_finished(point):
                say(f"{place}: finished before")
                continue
            if stopped(signals):
                return ExitCode.STOPPED_AND_SAVED
            say(f"{place}: {' '.join(point.settings)}")
            code = _run_point(sweep, point, loaded, nproc, signals)
            if code in (ExitCode.STOPPED_AND_SAVED, ExitCode.INTERRUPTED):
                return code
            if code != ExitCode.DONE:
                say(f"{place}: failed with exit code {code}")
                failed.append(code)
                if not go_on:
                    break
    return failed[0] if failed else ExitCode.DONE


def stopped(signals: Signals) -> bool:
    """Return whether a signal has asked to stop."""
    for number in signals.wait(0):
        signals.judge(number)
    return bool(signals.first)


def _run_point(sweep: Sweep, point: Point, loaded: Loaded, nproc: int, signals: Signals) -> int:
    command = ["run", str(sweep.recipe), *(f"--set={text}" for text in sweep.settings(point))]
    return launch(
        trainer_command(command),
        nproc,
        log_dir=sweep.run_folder(point) / "logs",
        on_failure=partial(record_failure, sweep.run_folder(point)),
        stop_timeout_seconds=loaded.recipe.resilience.stop_timeout_seconds,
        signals=signals,
    )
