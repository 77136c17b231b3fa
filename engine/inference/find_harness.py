"""Finds lm-evaluation-harness, which is imported where tasks are named alone; names its scores."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from ..core.errors import EnvironmentFault
from ..core.extras import install_command


def import_harness() -> ModuleType:
    """Return the module that runs tasks.

    Raises:
        EnvironmentFault: the harness is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise EnvironmentFault(
            "tasks need lm-evaluation-harness", install_command("eval")
        ) from error
    return import_module(".harness", __package__)


def name_scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the scores of results as `TASK/METRIC`, or `TASK/METRIC/FILTER` of a task's filter."""
    return {
        "/".join([task, metric, *[rule] * (rule != "none")]): float(value)
        for task, metrics in results.items()
        for name, value in metrics.items()
        for metric, _, rule in [name.partition(",")]
        if rule and not metric.endswith("_stderr") and isinstance(value, int | float)
    }
