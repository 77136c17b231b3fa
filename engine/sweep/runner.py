"""Runs the points of a sweep one after another, or writes a SLURM job array. Torch-free."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial

from ..core.errors import ExitCode
from ..core.run_state import record_failure
from ..launch.child import trainer_command
from ..launch.cluster import SECONDS_TO_SAVE, batch_script
from ..launch.ending import SignalPipe
from ..launch.local import LAUNCHER_SIGNALS, launch
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

    A signal is passed on to the current run, which saves and stops, and no further run starts.

    Args:
        sweep: the sweep.
        recipes: the recipe of each point, in the order of the points.
        nproc: the number of ranks of each run.
        go_on: True to continue with the next point after a failed run.
        say: prints a line for the user.

    Returns:
        The exit code of the run that was stopped, or of the first failed run, else 0.
    """
    failed: list[int] = []
    with SignalPipe(LAUNCHER_SIGNALS) as signals:
        for number, (point, loaded) in enumerate(zip(sweep.points, recipes, strict=True), 1):
            place = f"[{number}/{len(sweep.points)}] {point.name}"
            if sweep.is_finished(point):
                say(f"{place}: finished before")
                continue
            if stop_requested(signals):
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


def stop_requested(signals: SignalPipe) -> bool:
    """Return whether a signal has asked to stop."""
    for number in signals.read(0):
        signals.judge(number)
    return bool(signals.first)


def _run_point(sweep: Sweep, point: Point, loaded: Loaded, nproc: int, signals: SignalPipe) -> int:
    table = loaded.recipe.federation
    word = ["federate", "run"] if table and not table.is_job else ["run"]
    command = [*word, str(sweep.recipe), *(f"--set={text}" for text in sweep.settings(point))]
    return launch(
        trainer_command(command),
        nproc,
        log_dir=sweep.run_folder(point) / "logs",
        on_failure=partial(record_failure, sweep.run_folder(point)),
        stop_timeout_seconds=loaded.recipe.resilience.stop_timeout_seconds,
        signals=signals,
    )


def array_script(
    name: str, points: int, nproc: int, workdir: str, folder: str, command: Sequence[str]
) -> str:
    """Return the text of a SLURM batch script that runs a sweep as a job array.

    Args:
        name: the name of the job.
        points: the number of elements of the array.
        nproc: the number of SLURM tasks of each element, one a rank.
        workdir: the working directory, to which relative paths refer.
        folder: the folder of the sweep.
        command: the command to which `--index N` is appended to run one point.

    Raises:
        RecipeError: a value contains characters that a batch script cannot hold.
    """
    script = shlex.quote(f"{folder}/sweep.sbatch")
    return batch_script(
        {
            "job-name": name,
            "array": f"0-{points - 1}",
            "ntasks": nproc,
            "chdir": workdir,
            "output": folder.replace("%", "%%") + "/logs/%A_%a.out",
        },
        f'{shlex.join(command)} --index "$SLURM_ARRAY_TASK_ID"',
        [
            "What your cluster wants besides goes here or on the command line of sbatch, such as",
            f"  sbatch --partition=gpu --gpus-per-task=1 --time=04:00:00 {script}",
            f"SIGTERM comes {SECONDS_TO_SAVE} s before the time limit: the run saves and ends with",
            "75, and resumes from there when its element starts again.",
        ],
        job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
    )
