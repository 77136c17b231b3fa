"""The names of a metric's numbers, and how many samples a metric counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ....kernels.summation import widen
from .tables import MetricConfig, Outputs


def name_numbers(
    key: str, result: Tensor | Mapping[str, Tensor], labels: Sequence[str]
) -> dict[str, Tensor]:
    """Return the numbers of a result: `KEY`, `KEY/NAME`, or `KEY/CLASS` for each class."""
    if isinstance(result, Mapping):
        found: dict[str, Tensor] = {}
        for name, value in result.items():
            found |= name_numbers(f"{key}/{name}" if name else key, value, labels)
        return found
    if result.numel() == 1:
        return {key: result.reshape(())}
    names = labels if len(labels) == len(result) else [str(index) for index in range(len(result))]
    return {
        inner: value
        for name, row in zip(names, result, strict=True)
        for inner, value in name_numbers(f"{key}/{name}", row, labels).items()
    }


def find_ignored(config: MetricConfig) -> int | None:
    """Return the target that a metric leaves out; None: there is none."""
    return getattr(config, "ignore_index", None)


def weigh(config: MetricConfig, targets: Tensor, outputs: Outputs) -> float:
    """Return how many samples a metric counts; a label that it ignores is a part of one."""
    if not len(targets):
        return 0.0
    if outputs.kind == "regression":
        is_given = ~targets.isnan().view(len(targets), -1)
        is_part = config.missing != "samples"
        return float(widen(is_given).mean(1).sum() if is_part else is_given.all(1).sum())
    is_counted = targets >= 0
    if (ignored := find_ignored(config)) is not None:
        is_counted &= targets != ignored
    return float(widen(is_counted).view(len(targets), -1).mean(1).sum())
