"""The table of the speedrun, from the newest runs of each row."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from measure import ROOT
from race import SEEDS, Line, newest
from scipy import stats

PAGE = ROOT / "docs/speedrun.md"
BASELINE = "adamw"
HEADS = "row", "steps to the target", "share of AdamW's steps", "p", "reached", "CPU seconds a run"
BETWEEN = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of the table -->)", re.DOTALL)


def steps_of(runs: Sequence[Line]) -> np.ndarray:
    """Return the steps to the target by seed; of a run without it, those that it trained."""
    return np.array([float(run["steps"] or run["length"]) for run in runs])


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean, and the ends of its 95 % confidence interval by Student's t."""
    mean, half = float(values.mean()), 0.0
    if np.ptp(values):
        half = float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
    return mean, mean - half, mean + half


def compare(steps: np.ndarray, baseline: np.ndarray) -> tuple[float, float, float, float]:
    """Return a row's steps as a share of the baseline's, the 95 % interval, and p.

    A seed gives both the same initial weights and the same data: the share is the geometric mean
    over seeds, and p that of the two-sided paired t-test on the logarithms of steps.
    """
    logs = np.log(steps / baseline)
    p = float(stats.ttest_rel(np.log(steps), np.log(baseline)).pvalue)
    mean, low, high = (float(np.exp(value)) for value in interval(logs))
    return mean, low, high, p


def markdown() -> str:
    """Return the table of the rows that have a run for each seed, the fewest steps first."""
    runs = {row: own for row, own in newest().items() if len(own) == len(SEEDS)}
    if BASELINE not in runs:
        return f"`{BASELINE}` has not all of its runs yet.\n"
    baseline = steps_of(runs[BASELINE])
    rows = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for name, own in sorted(runs.items(), key=lambda item: steps_of(item[1]).mean()):
        mean, low, high = interval(steps_of(own))
        share = "1 | "
        if name != BASELINE:
            ratio, least, most, p = compare(steps_of(own), baseline)
            share = f"{ratio:.2f} ({least:.2f} to {most:.2f}) | {p:.1g}"
        reached = sum(run["steps"] is not None for run in own)
        seconds = sum(run["cpu_seconds"] for run in own) / len(own)
        rows.append(
            f"| `{name}` | {mean:.1f} ({low:.1f} to {high:.1f}) | {share} "
            f"| {reached} of {len(own)} | {seconds:.1f} |"
        )
    every = [run for own in runs.values() for run in own]
    pythons, torches = (sorted({run[key] for run in every}) for key in ("python", "torch"))
    versions = f"Python {', '.join(pythons)}, torch {', '.join(torches)}"
    return "\n".join([*rows, "", f"Data: the standard library of {versions}.", ""])


def write() -> None:
    """Put the table into its page."""
    PAGE.write_text(BETWEEN.sub(lambda _: markdown(), PAGE.read_text()))
