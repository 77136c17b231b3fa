"""Defines the plots of the report and selects the points of each run. Torch-free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..drawing.elements import NUM_COLOURS
from .runs import Row, RunData

MAX_POINTS = 40_000
"""largest number of points on a page, which take about 1.5 MB"""
FEWEST, MOST = 80, 1200
MAX_PLOTS = 40
SOURCE = "loss/"
"""prefix of the metric keys with the loss of one data source"""
LARGEST = 1e300
"""larger numbers count as infinite, because the difference of two of them may overflow"""


@dataclass(frozen=True)
class Curve:
    """The values of one metric key in the rows of one kind, times a scale."""

    kind: str
    key: str
    scale: float = 1.0
    exponential: bool = False
    """plot exp(value), which turns a loss into its perplexity"""
    label: str = ""
    """what the curve is called among others of its plot, such as a layer"""


@dataclass(frozen=True)
class Plot:
    """One figure, with the same curves for each run."""

    title: str
    section: str
    curves: tuple[Curve, ...]
    unit: str = ""
    log: bool = False
    """whether the vertical axis is logarithmic when the page opens"""


@dataclass(frozen=True)
class Series:
    """The points of one curve of one run; values that are not finite are None."""

    run: int
    dashed: bool
    step: list[float]
    tokens: list[float]
    seconds: list[float]
    y: list[float | None]
    mean: list[float | None]
    """mean of the points that each point stands for; empty if no points were left out"""
    noisy: bool
    """whether values are of single steps, so that smoothing makes the curve easier to read"""
    colour: int
    """of the run; of the label, where one run has several curves"""
    label: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object that the page's script reads."""
        return {
            "run": self.run,
            "dashed": self.dashed,
            "x": [self.step, self.tokens, self.seconds],
            "y": self.y,
            "mean": self.mean,
            "noisy": self.noisy,
            "colour": self.colour,
            "label": self.label,
        }


_LEARNING, _OPTIMIZATION, _SPEED = "Learning", "Optimization", "Speed and memory"
_ROUNDS = "Rounds of the federation"
_METRICS, _MONITORS = "Metrics of validations", "Monitors of training"
_MONITORED = {
    "weight_norm": "Weight norm by layer",
    "grad_norm": "Gradient norm by layer",
    "update_norm": "Update norm by layer",
    "update_ratio": "Update norm by weight norm, by layer",
}
_NO_METRICS = {"samples", "total_loss"}
_PLOTS = (
    Plot("Loss", _LEARNING, (Curve("train", "loss"), Curve("eval", "loss"))),
    Plot("Validation loss", _LEARNING, (Curve("eval", "loss"),)),
    Plot("Validation perplexity", _LEARNING, (Curve("eval", "loss", exponential=True),), log=True),
    Plot("Validation bits per byte", _LEARNING, (Curve("eval", "bits_per_byte"),)),
    Plot("Loss with regularisers", _LEARNING, (Curve("train", "total_loss"),)),
    Plot("Learning rate", _OPTIMIZATION, (Curve("train", "lr"),)),
    Plot("Gradient norm", _OPTIMIZATION, (Curve("train", "grad_norm"),)),
    Plot("Loss of rounds", _ROUNDS, (Curve("round", "loss"),)),
    Plot("Pseudo-gradient norm", _ROUNDS, (Curve("round", "pseudo_gradient_norm"),)),
    Plot("Noise scale of pseudo-gradients", _ROUNDS, (Curve("round", "noise_scale"),), "clients"),
    Plot(
        "Bytes of a round",
        _ROUNDS,
        (
            Curve("round", "bytes_sent", 1e-6, label="sent"),
            Curve("round", "bytes_received", 1e-6, label="received"),
        ),
        "MB",
    ),
    Plot(
        "Time of a round",
        _ROUNDS,
        (
            Curve("round", "seconds", label="all"),
            Curve("round", "train_seconds", label="training"),
            Curve("round", "server_seconds", label="server"),
        ),
        "s",
    ),
    Plot("Throughput", _SPEED, (Curve("train", "tokens_per_second"),), "tokens/s"),
    Plot("Model FLOP/s utilization", _SPEED, (Curve("train", "mfu", 100.0),), "%"),
    Plot("Time per step", _SPEED, (Curve("train", "step_seconds", 1000.0),), "ms"),
    Plot("Wait for data per step", _SPEED, (Curve("train", "data_seconds", 1000.0),), "ms"),
    Plot("Peak memory", _SPEED, (Curve("train", "memory_bytes", 2.0**-30),), "GiB"),
)
_SHOWN = {(curve.kind, curve.key) for plot in _PLOTS for curve in plot.curves}
_AXES = {"step", "tokens", "seconds", "time", "perplexity"}


def plots_of(runs: Sequence[RunData]) -> list[tuple[Plot, list[Series]]]:
    """Return the plots that have points, with one more for each other key of metrics.jsonl."""
    further = dict.fromkeys(
        (kind, key)
        for run in runs
        for kind, rows in run.rows.items()
        for row in rows
        for key in row
        if key not in _AXES and (kind, key) not in _SHOWN
    )
    by_source = dict.fromkeys(key for _, key in further if key.startswith(SOURCE))
    groups = Counter(
        (kind, key.partition("/")[0])
        for kind, key in further
        if "/" in key and key not in by_source
    )
    grouped = [group for group, count in groups.items() if count > 1]
    metrics = dict.fromkeys(
        key for kind, key in further if kind == "eval" and "/" not in key and key not in _NO_METRICS
    )
    plots = [
        *_PLOTS,
        *(
            Plot(f"Loss: {key.removeprefix(SOURCE)}", "Loss by source",
                 (Curve("train", key), Curve("eval", key)))
            for key in by_source
        ),
        *(Plot(_titled(key), _METRICS, (Curve("eval", key),)) for key in metrics),
        *(_parts_plot(kind, prefix, further) for kind, prefix in grouped),
        *(
            Plot(f"{kind}: {key}", "Further numbers", (Curve(kind, key),))
            for kind, key in further
            if key not in by_source
            and (kind, key.partition("/")[0]) not in grouped
            and (kind != "eval" or key not in metrics)
        ),
    ]  # fmt: skip
    used = [plot for plot in plots if _has_points(runs, plot)][:MAX_PLOTS]
    num_series = max(1, sum(len(plot.curves) for plot in used) * len(runs))
    limit = max(FEWEST, min(MOST, MAX_POINTS // num_series))
    return [(plot, _series(runs, plot, limit)) for plot in used]


def _titled(key: str) -> str:
    """Return the title of a number of an evaluation, `KEY` or `SPLIT.KEY`."""
    split, dot, name = key.partition(".")
    words = (name if dot else key).replace("_", " ")
    return f"{words.capitalize()} of {split}" if dot else f"Validation {words}"


def _parts_plot(kind: str, prefix: str, keys: Iterable[tuple[str, str]]) -> Plot:
    """Return the plot of all keys `PREFIX/PART`, with a curve for each layer or class."""
    curves = tuple(
        Curve(kind, key, label=key.removeprefix(f"{prefix}/"))
        for each, key in keys
        if each == kind and key.startswith(f"{prefix}/")
    )
    if kind == "eval":
        return Plot(f"{_titled(prefix)} by part", _METRICS, curves)
    return Plot(_MONITORED.get(prefix, f"{kind}: {prefix}"), _MONITORS, curves, log=True)


def _has_points(runs: Sequence[RunData], plot: Plot) -> bool:
    return any(curve.key in row for run in runs for curve in plot.curves
               for row in run.rows.get(curve.kind, []))  # fmt: skip


def _series(runs: Sequence[RunData], plot: Plot, limit: int) -> list[Series]:
    series = []
    for number, run in enumerate(runs):
        for index, curve in enumerate(plot.curves):
            rows = [row for row in run.rows.get(curve.kind, []) if curve.key in row]
            if rows:
                mixed = len({each.kind for each in plot.curves}) > 1
                colour = index if curve.label and len(runs) == 1 else number
                series.append(_thin_curve(number, rows, curve, mixed, limit, colour))
    return series


def _thin_curve(
    number: int, rows: Sequence[Row], curve: Curve, mixed: bool, limit: int, colour: int
) -> Series:
    values = [row[curve.key] * curve.scale for row in rows]
    if curve.exponential:
        values = [math.exp(value) if value < 690 else math.inf for value in values]
    values = [value if abs(value) < LARGEST else math.inf for value in values]
    kept, means = thin(values, limit)
    return Series(
        run=number,
        dashed=mixed and curve.kind == "eval",
        step=[_short(rows[index]["step"]) for index in kept],
        tokens=[_short(rows[index]["tokens"]) for index in kept],
        seconds=[round(rows[index]["seconds"], 2) for index in kept],
        y=[_short(values[index]) if math.isfinite(values[index]) else None for index in kept],
        mean=[mean if mean is None else _short(mean) for mean in means],
        noisy=curve.kind != "eval",
        colour=colour % NUM_COLOURS,
        label=curve.label,
    )


def thin(values: Sequence[float], limit: int) -> tuple[list[int], list[float | None]]:
    """Choose points that draw nearly the same curve: the minimum and maximum of each bin.

    Args:
        values: the values of the curve.
        limit: about the largest number of points to keep.

    Returns:
        The indices of the points to keep, with the first non-finite value of each bin among them,
        and the mean of each point's bin. The second list is empty if all points are kept.
    """
    count = len(values)
    if count <= limit:
        return list(range(count)), []
    stretches = max(1, limit // 2)
    kept: list[int] = []
    means: list[float | None] = []
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [index for index in stretch if math.isfinite(values[index])]
        chosen = {index for index in stretch if not math.isfinite(values[index])}
        chosen = {min(chosen)} if chosen else set()
        if finite:
            chosen |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        mean = sum(values[index] / len(finite) for index in finite) if finite else None
        kept += sorted(chosen)
        means += [mean] * len(chosen)
    return kept, means


def _short(value: float) -> float:
    """Round a value to six significant digits; an integer stays as it is."""
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.6g}")
