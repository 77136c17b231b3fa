"""The tables of the report, as HTML. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from ..core.text.display import format_value
from .facts import Number, facts_of, numbers_of
from .runs import RunData, differences, have_different_tokenizers, lacks_bits_per_byte, read_profile
from .svg import NUM_COLOURS, shown

NOTHING = "&ndash;"


def numbers(runs: Sequence[RunData]) -> str:
    """Return the final numbers, a row a run."""
    columns = numbers_of(runs)
    head = "".join(f"<th>{escape(number.title)}</th>" for number, _ in columns)
    rows = "".join(
        f'<tr><th scope="row">{swatch(index)}{escape(run.name)}</th>'
        + "".join(_cell(number, values, index) for number, values in columns)
        + f'<td><span class="badge {run.status.state}">{run.status.state}</span></td></tr>'
        for index, run in enumerate(runs)
    )
    return (
        '<section><h2>Numbers</h2><div class="wide"><table class="numbers">'
        f"<thead><tr><th>Run</th>{head}<th>State</th></tr></thead><tbody>{rows}</tbody>"
        f"</table></div>{_comparability(runs)}</section>"
    )


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


def _cell(number: Number, values: Sequence[float | None], index: int) -> str:
    value = values[index]
    if value is None:
        return f"<td>{NOTHING}</td>"
    comparable = [each for each in values if each is not None and not math.isnan(each)]
    texts = {number.show(each) for each in comparable}
    text = number.show(value)
    is_best = number.best and len(texts) > 1 and text == number.show(number.best(comparable))
    return f"<td><strong>{escape(text)}</strong></td>" if is_best else f"<td>{escape(text)}</td>"


def swatch(index: int) -> str:
    """Return a piece of a run's line."""
    colour = f"c{index % NUM_COLOURS}"
    return (
        '<svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        f'<path class="line {colour}" d="M1 5H17"/></svg>'
    )


def times(runs: Sequence[RunData]) -> str:
    """Return how each run's time was spent, as far as metrics.jsonl tells."""
    bars = []
    for run in runs:
        busy, waiting, other = run.seconds()
        parts = (("compute", busy - waiting), ("data", waiting), ("other", other))
        whole = sum(seconds for _, seconds in parts)
        if not 0 < whole < math.inf:
            continue
        x, rects, cells = 0.0, "", ""
        for word, seconds in parts:
            share = seconds / whole
            rects += f'<rect class="{word}" x="{x:.3f}%" width="{100 * share:.3f}%" height="18"/>'
            x += 100 * share
            cells += f"<td>{share:.1%}</td>"
        bars.append(
            f'<tr><th scope="row">{escape(run.name)}</th><td class="bar"><svg height="18" '
            f'aria-hidden="true">{rects}</svg></td>{cells}</tr>'
        )
    if not bars:
        return ""
    heads = "".join(
        f'<th><svg class="swatch" viewBox="0 0 18 10" aria-hidden="true"><rect class="{word}" '
        f'width="10" height="10" x="4" rx="2"/></svg>{text}</th>'
        for word, text in (("compute", "Steps"), ("data", "Wait for data"), ("other", "All else"))
    )
    return (
        '<section><h2>Where the time goes</h2><div class="wide"><table class="times"><thead><tr>'
        f"<th>Run</th><th></th>{heads}</tr></thead><tbody>{''.join(bars)}</tbody></table></div>"
        '<p class="quiet">All else: evaluation, checkpoints, and the time between attempts.</p>'
        "</section>"
    )


def recipe_differences(runs: Sequence[RunData]) -> str:
    """Return the keys whose values differ."""
    found = differences(runs)
    if not found:
        text = "The recipes are the same." if any(run.recipe for run in runs) else "No recipes."
        return f"<section><h2>Recipes</h2><p>{text}</p></section>"
    rows = [
        (f"<code>{escape(key)}</code>", [_value(value) for value in values])
        for key, values in found
    ]
    return _table("Where the recipes differ", runs, rows)


def _value(value: Any) -> str:
    return NOTHING if value is None else f"<code>{escape(format_value(value))}</code>"


def facts(runs: Sequence[RunData]) -> str:
    """Return how the runs were made."""
    facts = [facts_of(run) for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each)
    rows = [
        (key, [escape(each[key]) if key in each else NOTHING for each in facts]) for key in keys
    ]
    return _table("Facts", runs, rows)


def _table(title: str, runs: Sequence[RunData], rows: Sequence[tuple[str, list[str]]]) -> str:
    """Return a table with a column a run; its cells are HTML already."""
    head = "".join(
        f'<th scope="col">{swatch(index)}{escape(run.name)}</th>' for index, run in enumerate(runs)
    )
    head = f"<thead><tr><th></th>{head}</tr></thead>" if len(runs) > 1 else ""
    body = "".join(
        f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for name, cells in rows
    )
    return (
        f'<section><h2>{title}</h2><div class="wide"><table>{head}<tbody>{body}</tbody></table>'
        "</div></section>"
    )


def whole_recipe(run: RunData) -> str:
    """Return every key of a run's recipe."""
    if not run.recipe:
        return ""
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(key)}</code></th><td>{_value(value)}</td></tr>'
        for key, value in run.recipe.items()
    )
    return (
        "<section><details><summary>The recipe, every default spelled out</summary>"
        f'<div class="wide"><table><tbody>{rows}</tbody></table></div></details></section>'
    )


def profiles(runs: Sequence[RunData]) -> str:
    """Return what `[profile]` found out about steps, for the runs that have it."""
    found = [(run, profile) for run in runs if (profile := read_profile(run.path))]
    if not found:
        return ""
    names = dict.fromkeys(name for _, profile in found for name in profile.phases)
    rows = [(escape(name), [_duration(profile.phases.get(name), profile.step_seconds)
                            for _, profile in found]) for name in names]  # fmt: skip
    rows.append(("a step", [_duration(profile.step_seconds, None) for _, profile in found]))
    if len(runs) == 1:
        rows += [
            (f"<code>{escape(name)}</code>", [_duration(seconds, found[0][1].step_seconds)])
            for name, seconds in found[0][1].operators.items()
        ]
    return _table("Profile of a step", [run for run, _ in found], rows)


def _duration(seconds: float | None, whole: float | None) -> str:
    if seconds is None:
        return NOTHING
    share = f' <span class="quiet">{seconds / whole:.1%}</span>' if whole else ""
    return f"{shown(1000 * seconds)} ms{share}"
