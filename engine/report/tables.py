"""The tables of the report: numbers, times, recipes and facts of runs, as HTML. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ..checkpoint.manifest import Manifest
from ..core.run_state import read_state
from ..core.text.display import format_value
from ..drawing.elements import NUM_COLOURS, format_short, section, table
from .plots import SOURCE
from .runs import (
    BITS,
    RunData,
    differences,
    have_different_tokenizers,
    lacks_bits_per_byte,
    read_profile,
)
from .status import clock

MAX_SOURCES = 12
"""largest number of data sources that get a column of their own"""


@dataclass(frozen=True)
class Number:
    """A column of the table of numbers."""

    title: str
    value: Callable[[RunData], float | None]
    show: Callable[[float], str] = format_short
    best: Callable[[Sequence[float]], float] | None = None
    """`min` or `max`, which selects the best value; None if no value is better than another"""
    per_token: bool = False
    """whether the number depends on the tokenizer, so that only runs with the same one compare"""
    per_byte: bool = False
    """whether the number is per byte of text, which compares across tokenizers"""


def _perplexity(run: RunData) -> float | None:
    loss = run.lowest("eval", "loss")
    return math.exp(loss) if loss is not None and loss < 700 else None


def _memory(run: RunData) -> float | None:
    column = run.column("train", "memory_bytes")
    return max(column) / 2**30 if column else None


def _format_loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else format_short(value)


NUMBERS = (
    Number("Step", lambda run: run.last("train", "step"), lambda value: f"{value:,.0f}"),
    Number("Tokens", lambda run: run.last("train", "tokens")),
    Number("Training loss", lambda run: run.last("train", "loss"), _format_loss, min, True),
    Number("Validation loss", lambda run: run.last("eval", "loss"), _format_loss, min, True),
    Number("Best validation", lambda run: run.lowest("eval", "loss"), _format_loss, min, True),
    Number("Best perplexity", _perplexity, format_short, min, True),
    Number("Bits per byte", lambda run: run.last("eval", BITS), _format_loss, min, per_byte=True),
    Number(
        "Best bits per byte", lambda run: run.lowest("eval", BITS), _format_loss, min, per_byte=True
    ),
    Number(
        "Tokens/s", lambda run: run.median("train", "tokens_per_second"), format_short, max, True
    ),
    Number("MFU", lambda run: run.median("train", "mfu"), lambda value: f"{value:.1%}", max),
    Number("Peak memory", _memory, lambda value: f"{value:.2f} GiB", min),
    Number("Training time", lambda run: run.last("train", "seconds"), clock),
)


def _of_source(key: str) -> Number:
    title = f"Validation: {key.removeprefix(SOURCE)}"
    return Number(title, lambda run: run.last("eval", key), _format_loss, min, True)


def numbers_of(runs: Sequence[RunData]) -> list[tuple[Number, list[float | None]]]:
    """Return the columns for which at least one run has a value, with the value of each run.

    If tokenizers differ, no run is marked best in numbers per token, nor in bits per byte if
    a run lacks them.
    """
    keys = dict.fromkeys(key for run in runs for row in run.rows.get("eval", []) for key in row)
    by_source = [_of_source(key) for key in keys if key.startswith(SOURCE)][:MAX_SOURCES]
    columns = [*NUMBERS, *by_source]
    if have_different_tokenizers(runs):
        unknown = lacks_bits_per_byte(runs)
        columns = [
            replace(each, best=None) if each.per_token or (unknown and each.per_byte) else each
            for each in columns
        ]
    table = [(number, [number.value(run) for run in runs]) for number in columns]
    return [(number, values) for number, values in table if any(v is not None for v in values)]


def facts_of(run: RunData) -> dict[str, str]:
    """Return the facts about a run's environment and state, by title."""
    manifest, record, status = run.manifest, read_state(run.path), run.status
    facts = {"State": status.state + (f": {status.reason}" if status.reason else "")}
    facts["Steps"] = f"{status.step:,} of {status.total_steps:,}" if status.total_steps else "?"
    facts["Attempts"] = str(status.attempts)
    if record is not None:
        facts |= {"Device": record.device, "Ranks": str(record.world)}
        facts |= {"Newest attempt": record.started_at, "Ended": record.ended_at or "not yet"}
    if manifest is not None:
        facts["Ranks"] = str(manifest.world)
        facts["Parameters"] = f"{_parameters(manifest):,}"
        facts["Versions"] = ", ".join(f"{name} {v}" for name, v in manifest.versions.items())
    steps = [f"{step:,}" for step in run.checkpoints]
    facts["Checkpoints"] = ", ".join(["…"] * (len(steps) > 8) + steps[-8:]) or "none"
    facts["Disk"] = f"{status.disk_bytes / 2**20:,.1f} MiB"
    facts["Folder"] = str(run.path)
    if status.events:
        facts["Events"] = f"{status.events:,}, the newest {status.newest_event}"
    if status.warnings:
        facts["Warnings"] = "; ".join(status.warnings)
    return facts


def _parameters(manifest: Manifest) -> int:
    return sum(
        math.prod(entry["shape"])
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    )


NOTHING = "&ndash;"


def numbers(runs: Sequence[RunData]) -> str:
    """Return the final numbers, a row a run."""
    columns = numbers_of(runs)
    head = ["Run", *(escape(number.title) for number, _ in columns), "State"]
    rows = [
        [
            _name(runs, index),
            *(_best_marked(number, values, index) for number, values in columns),
            f'<span class="badge {run.status.state}">{run.status.state}</span>',
        ]
        for index, run in enumerate(runs)
    ]
    return section("Numbers", table(rows, head, "numbers") + _comparability(runs))


def _name(runs: Sequence[RunData], index: int) -> str:
    return swatch(index) + escape(runs[index].name)


def _comparability(runs: Sequence[RunData]) -> str:
    """Return a note on how to compare losses of runs with different tokenizers."""
    if not have_different_tokenizers(runs):
        return ""
    text = "The tokenizers differ: losses per token cannot be compared; bits per byte can."
    if lacking := ", ".join(run.name for run in lacks_bits_per_byte(runs)):
        text = (
            "The tokenizers differ: losses per token cannot be compared, and no run is marked as "
            f"the best: the evaluations of {lacking} have no bits per byte."
        )
    return f'<p class="quiet">{escape(text)}</p>'


def _best_marked(number: Number, values: Sequence[float | None], index: int) -> str:
    value = values[index]
    if value is None:
        return NOTHING
    comparable = [value for value in values if value is not None and not math.isnan(value)]
    text = number.show(value)
    differ = len({number.show(value) for value in comparable}) > 1
    is_best = number.best and differ and text == number.show(number.best(comparable))
    return f"<strong>{escape(text)}</strong>" if is_best else escape(text)


def swatch(index: int) -> str:
    """Return a piece of a run's line."""
    colour = f"c{index % NUM_COLOURS}"
    return (
        '<svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        f'<path class="line {colour}" d="M1 5H17"/></svg>'
    )


def times(runs: Sequence[RunData]) -> str:
    """Return a table of how each run spent its time, according to metrics.jsonl."""
    rows = []
    for run in runs:
        busy, waiting, other = run.seconds()
        parts = {"compute": busy - waiting, "data": waiting, "other": other}
        whole = sum(parts.values())
        if 0 < whole < math.inf:
            x, rects = 0.0, ""
            for word, seconds in parts.items():
                width = 100 * seconds / whole
                rects += f'<rect class="{word}" x="{x:.3f}%" width="{width:.3f}%" height="18"/>'
                x += width
            bar = f'<svg height="18" aria-hidden="true">{rects}</svg>'
            shares = [f"{seconds / whole:.1%}" for seconds in parts.values()]
            rows.append([escape(run.name), bar, *shares])
    if not rows:
        return ""
    words = {"compute": "Steps", "data": "Wait for data", "other": "All else"}
    heads = [
        '<svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        f'<rect class="{word}" width="10" height="10" x="4" rx="2"/></svg>{text}'
        for word, text in words.items()
    ]
    note = "All else: evaluation, checkpoints, and the time between attempts."
    return section(
        "Where the time goes",
        table(rows, ["Run", "", *heads], "times") + f'<p class="quiet">{note}</p>',
    )


def recipe_differences(runs: Sequence[RunData]) -> str:
    """Return the keys whose values differ."""
    rows = [
        [f"<code>{escape(key)}</code>", *map(_value, values)] for key, values in differences(runs)
    ]
    if not rows:
        text = "The recipes are the same." if any(run.recipe for run in runs) else "No recipes."
        return section("Recipes", f"<p>{text}</p>")
    return _by_run("Where the recipes differ", runs, rows)


def _value(value: Any) -> str:
    return NOTHING if value is None else f"<code>{escape(format_value(value))}</code>"


def facts(runs: Sequence[RunData]) -> str:
    """Return how the runs were made."""
    facts = [facts_of(run) for run in runs]
    keys = dict.fromkeys(key for known in facts for key in known)
    rows = [
        [key, *(escape(known[key]) if key in known else NOTHING for known in facts)] for key in keys
    ]
    return _by_run("Facts", runs, rows)


def _by_run(title: str, runs: Sequence[RunData], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a column a run; its cells are HTML already."""
    names = [_name(runs, index) for index in range(len(runs))]
    return section(title, table(rows, ["", *names] if len(runs) > 1 else ()))


def whole_recipe(run: RunData) -> str:
    """Return every key of a run's recipe."""
    if not run.recipe:
        return ""
    rows = [[f"<code>{escape(key)}</code>", _value(value)] for key, value in run.recipe.items()]
    return (
        "<section><details><summary>The recipe, every default spelled out</summary>"
        f"{table(rows)}</details></section>"
    )


def profiles(runs: Sequence[RunData]) -> str:
    """Return the times that `[profile]` measured in a step, for the runs that have it."""
    known = [(run, profile) for run in runs if (profile := read_profile(run.path))]
    if not known:
        return ""
    names = dict.fromkeys(name for _, profile in known for name in profile.phases)
    rows = [
        [
            escape(name),
            *(_duration(profile.phases.get(name), profile.step_seconds) for _, profile in known),
        ]
        for name in names
    ]
    rows.append(["a step", *(_duration(profile.step_seconds, None) for _, profile in known)])
    if len(runs) == 1:
        profile = known[0][1]
        rows += [
            [f"<code>{escape(name)}</code>", _duration(seconds, profile.step_seconds)]
            for name, seconds in profile.operators.items()
        ]
    return _by_run("Profile of a step", [run for run, _ in known], rows)


def _duration(seconds: float | None, whole: float | None) -> str:
    if seconds is None:
        return NOTHING
    share = f' <span class="quiet">{seconds / whole:.1%}</span>' if whole else ""
    return f"{format_short(1000 * seconds)} ms{share}"
