"""A sweep as a SLURM job array: one element a point, queued again when it was stopped."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --ntasks={nproc}
#SBATCH --chdir={workdir}
#SBATCH --output={output}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@300
# What your cluster wants besides goes here or on the command line of sbatch, such as
#   sbatch --partition=gpu --gpus-per-task=1 --time=04:00:00 {script}
# SIGTERM comes 300 s before the time limit: the run saves and ends with 75, and goes on from there
# when its element starts again.

srun {command} --index "$SLURM_ARRAY_TASK_ID"
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


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

    Source: sbatch(1), scontrol(1).
    """
    output = folder.replace("%", "%%") + "/logs/%A_%a.out"
    return SCRIPT.format(
        name=shlex.quote(name),
        last=points - 1,
        nproc=nproc,
        workdir=shlex.quote(workdir),
        output=shlex.quote(output),
        script=shlex.quote(f"{folder}/sweep.sbatch"),
        command=shlex.join(command),
    )
