"""Runs the checks of `trainer doctor`. Only the checks that need torch import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..core.errors import TrainerError
from . import machine


def examine(runs: Path) -> Iterator[machine.Finding]:
    """Run all checks and yield their findings.

    An unexpected error in a check becomes a finding with the state "bad", and the other checks run.

    Args:
        runs: the folder in which run directories are created.
    """
    checks: dict[str, Callable[[], Iterator[machine.Finding]]] = {
        "versions": machine.check_versions,
        "extras": machine.check_extras,
        "job": machine.check_job,
        "devices": partial(_with_torch, "check_devices"),
        "process groups": partial(_with_torch, "check_process_groups"),
        "kernels": partial(_with_torch, "check_kernels"),
        "runs folder": partial(machine.check_folder, runs),
    }
    for subject, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            hint = error.hint if isinstance(error, TrainerError) else ""
            yield machine.Finding(subject, "bad", str(error) or type(error).__name__, hint)


def _with_torch(check: str) -> Iterator[machine.Finding]:
    """Yield the findings of a function of `torch_checks`, named by `check`.

    The import is inside, so that a torch that cannot be imported becomes a finding.
    """
    from . import torch_checks

    yield from getattr(torch_checks, check)()
