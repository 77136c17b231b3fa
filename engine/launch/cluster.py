"""Command lines of torchrun and batch scripts of SLURM. Torch-free."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from ..core.errors import ExitCode, RecipeError
from ..core.text.display import format_value


def torchrun_commands(
    nodes: int, processes: int, host: str, port: int, arguments: Sequence[str]
) -> list[str]:
    """Return the command line of each machine, in the order of their node ranks.

    Args:
        nodes: number of machines.
        processes: number of ranks on each.
        host: name or address of the first machine, as the others reach it.
        port: a free port of that machine.
        arguments: arguments of `trainer`.

    Source: torch.distributed.run.
    """
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={processes}"]
    # `trainer` is an executable, which torchrun would otherwise give to Python as a script.
    run = ["--no-python", "trainer", *arguments]
    if nodes == 1:
        return [shlex.join([*words, "--standalone", *run])]
    endpoint = [f"--master-addr={host}", f"--master-port={port}"]
    return [shlex.join([*words, f"--node-rank={node}", *endpoint, *run]) for node in range(nodes)]


SECONDS_TO_SAVE = 300
SCRIPT = """\
#!/bin/bash
{options}
{notes}

trap : TERM  # the job's steps handle it; this shell waits for them
srun {srun}{command}
code=$?
{requeue}exit "$code"
"""
REQUEUE = """\
if [ "$code" -eq {code} ]; then
    scontrol requeue "{job}"
fi
"""
_TIME = re.compile(r"(?:(?P<days>\d{1,4})-)?(?P<a>\d{1,6})(?::(?P<b>\d{1,2}))?(?::(?P<c>\d{1,2}))?")


def batch_script(
    options: Mapping[str, str | int],
    command: str,
    notes: Sequence[str],
    *,
    job: str = "$SLURM_JOB_ID",
    requeue: bool = True,
    srun: str = "",
) -> str:
    """Return the text of a batch script.

    Args:
        options: options of sbatch by their long names.
        command: command of each task, quoted for the shell.
        notes: lines of a comment.
        job: shell words that name the job to requeue.
        requeue: whether to requeue the job when the run was stopped and has saved.
        srun: further options of srun, quoted for the shell.

    Raises:
        RecipeError: a value has a character that a script cannot hold.

    Source: sbatch(1), scontrol(1).
    """
    words: dict[str, str | int] = {
        **options,
        # A requeued job writes to the log that it had; sbatch would empty it.
        "open-mode": "append",
        "requeue" if requeue else "no-requeue": "",
        # Without "B:" SLURM signals the processes of srun, and not the shell of the script.
        "signal": f"TERM@{SECONDS_TO_SAVE}",
    }
    lines = [
        f"--{name}={_option(name, value)}" if value != "" else f"--{name}"
        for name, value in words.items()
    ]
    again = REQUEUE.format(code=int(ExitCode.STOPPED_AND_SAVED), job=job)
    return SCRIPT.format(
        options="\n".join(f"#SBATCH {line}" for line in lines),
        notes="\n".join(f"# {require_one_line(line)}" for line in notes),
        srun=f"{require_one_line(srun)} " if srun else "",
        command=require_one_line(command),
        requeue=again if requeue else "",
    )


def _option(name: str, value: str | int) -> str:
    text = require_one_line(str(value))
    if re.search(r"""['"\\]""", text):
        hint = "go to a folder, or give a name, without quotes and backslashes"
        raise RecipeError(f"{format_value(text)} cannot be sbatch's --{name}", hint)
    return shlex.quote(text)


def require_one_line(text: str) -> str:
    """Return a text, if it fits on one line of a script.

    Raises:
        RecipeError: the text has a line break or another character that is not printable.
    """
    if not text.isprintable():
        hint = "leave out line breaks and other characters that do not print"
        raise RecipeError(f"{format_value(text)} cannot stand in a script", hint)
    return text


def require_time(text: str) -> None:
    """Check a time limit: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.

    Raises:
        RecipeError: the text has another form, or leaves too little time before the run must save.
    """
    match = _TIME.fullmatch(text)
    if not match:
        message = f"--time {format_value(text)} is no time"
        raise RecipeError(message, "such as 12:00:00 or 2-00:00:00")
    first, *others = (int(part) for part in match.group("a", "b", "c") if part is not None)
    if match["days"] is not None or len(others) == 2:
        hours, minutes, seconds = [first, *others, 0, 0][:3]
        total = (24 * int(match["days"] or 0) + hours) * 3600 + minutes * 60 + seconds
    else:
        total = 60 * first + sum(others)
    if total <= 2 * SECONDS_TO_SAVE:
        raise RecipeError(
            f"--time {text} is too short: {SECONDS_TO_SAVE} s before its end the run saves",
            f"give more than {2 * SECONDS_TO_SAVE // 60} minutes",
        )
