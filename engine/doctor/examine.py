"""Runs the checks of `trainer doctor`. Torch is loaded by the checks that need it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..core.errors import TrainerError
from . import machine


def examine(runs: Path) -> Iterator[machine.Finding]:
    """Yield what is found on this machine; `runs` is the folder where runs are kept.

    A check that fails in a way we did not foresee is a bad finding and not the end.
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
    """Yield the findings of a function of `torch_checks`; a torch that cannot load is a finding."""
    from . import torch_checks

    yield from getattr(torch_checks, check)()
