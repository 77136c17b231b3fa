"""A sweep as a SLURM job array: one element a point, queued again when it was stopped."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..launch.cluster import SECONDS_TO_SAVE, batch_script


def array_script(
    name: str, points: int, nproc: int, workdir: str, folder: str, command: Sequence[str]
) -> str:
    """Return the text of a batch script.

    Args:
        points: how many elements the array has.
        nproc: tasks of each.
        workdir: where relative paths start.
        folder: of the sweep.
        command: runs the point that a further `--index N` names.

    Raises:
        RecipeError: a value cannot stand in a script.
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
