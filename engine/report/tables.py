"""The tables of the report, as HTML. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from ..core.text.display import format_value
from ..drawing.elements import NUM_COLOURS, format_short, section, table
from .facts import Number, facts_of, numbers_of
from .runs import RunData, differences, have_different_tokenizers, lacks_bits_per_byte, read_profile

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
    """Return what to know about losses of runs with different tokenizers."""
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
    """Return how each run's time was spent, as far as metrics.jsonl tells."""
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
