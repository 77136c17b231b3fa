"""Metrics that are means over samples: maps of classes and answers, which are measured singly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.errors import DataError
from .tables import MetricConfig, Outputs


class SampleMeans:
    """Measures each sample by itself, so that batches and ranks do not matter.

    Args:
        configs: metrics, those with `is_sample_mean` among them.
        outputs: what the task predicts, with the number of classes.
    """

    def __init__(self, configs: Sequence[MetricConfig], outputs: Outputs) -> None:
        self._configs = [each for each in configs if each.is_sample_mean]
        self._numbers = {each.row_key: each.numbers(outputs) for each in self._configs}
        self._functions: dict[str, Any] = {
            each.row_key: each.build(outputs) for each in self._configs
        }

    @property
    def names(self) -> list[str]:
        """The names of all means: KEY, or KEY/NAME for each of several numbers."""
        return [_join(key, name) for key, names in self._numbers.items() for name in names]

    def measure_maps(self, predictions: Tensor, targets: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each mean's name with its numbers of all samples, [N]; NaN where there is none.

        Args:
            predictions: classes [N, ...].
            targets: classes [N, ...].

        Raises:
            DataError: a sample is no map, or torchmetrics refuses it.
        """
        if self._configs and targets.dim() < 2:
            raise DataError(
                f'the metric "{self._configs[0].row_key}" needs a map of classes in each sample, '
                f"and targets have the shape {[*targets.shape]}",
                "give targets of the shape [N, ...], and outputs of [N, ..., classes]",
            )
        yield from self.measure(predictions, targets)

    def measure(
        self, predictions: Sequence[Any] | Tensor, targets: Sequence[Any] | Tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each mean's name with its numbers of all samples, [N]; NaN where there is none."""
        if not len(targets):
            return
        for key, names in self._numbers.items():
            function = self._functions[key]
            with warnings.catch_warnings():
                # dice_score warns at each call that its default has changed.
                warnings.filterwarnings("ignore", "dice_score metric currently defaults")
                results = [function(*pair) for pair in zip(predictions, targets, strict=True)]
            if isinstance(results[0], Tensor):
                columns = torch.stack([each.flatten() for each in results], 1).unbind()
                yield from zip((_join(key, name) for name in names), columns, strict=True)
            else:
                for name in names:
                    yield _join(key, name), torch.stack([each[name] for each in results])


def _join(key: str, name: str) -> str:
    return f"{key}/{name}" if name else key
