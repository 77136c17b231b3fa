"""The report: one HTML file that needs nothing else and asks nobody. Torch-free.

Everything that comes from files is escaped. The policy in its head lets only this page's own style
and script run, both named by their hashes, and lets nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from ..recipe.shown import shown_value
from .facts import Number, facts_of, numbers_of
from .plots import Plot, Series, plots_of
from .runs import Run, differences, names_of, read_run
from .svg import NUM_COLOURS, draw

HERO_WIDTH = 1264
NOTHING = "&ndash;"
_STATES = {"running", "finished", "stopped", "failed", "died"}


def write_page(paths: Sequence[Path], title: str = "") -> str:
    """Return the page about some run directories.

    Args:
        title: default: the run's name, or how many are compared.
    """
    names = names_of(paths)
    runs = [read_run(path, name) for path, name in zip(paths, names, strict=True)]
    title = title or (names[0] if len(runs) == 1 else f"{len(runs)} runs compared")
    plots = plots_of(runs)
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    data = {"runs": names, "plots": [_plot_data(plot, series) for plot, series in plots]}
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    body = "".join(
        [
            _header(runs, title),
            _cards(runs) if len(runs) == 1 else _numbers(runs),
            _controls(runs),
            *_plots(plots, names),
            _times(runs),
            _differences(runs) if len(runs) > 1 else "",
            _facts(runs),
            _recipe(runs[0]) if len(runs) == 1 else "",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{_json(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _json(data: Any) -> str:
    """Return JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _plot_data(plot: Plot, series: Sequence[Series]) -> dict[str, Any]:
    return {
        "title": plot.title,
        "unit": plot.unit,
        "log": plot.log,
        "series": [one.as_json() for one in series],
    }


def _header(runs: Sequence[Run], title: str) -> str:
    now = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    states: list[str] = [run.status.state for run in runs]
    badges = "".join(
        f'<span class="badge {state}">{states.count(state) if len(runs) > 1 else ""} {state}</span>'
        for state in sorted(_STATES & {*states})
    )
    return (
        f'<header><div><h1>{escape(title)}</h1><p class="quiet">Training report, {now} {badges}'
        '</p></div><button id="theme" type="button" hidden>Light or dark</button></header>'
    )


def _cards(runs: Sequence[Run]) -> str:
    cards = "".join(
        f"<div><dt>{number.title}</dt><dd>{escape(number.show(value))}</dd></div>"
        for number, values in numbers_of(runs)
        if (value := values[0]) is not None
    )
    return f'<dl class="cards">{cards}</dl>'


def _numbers(runs: Sequence[Run]) -> str:
    columns = numbers_of(runs)
    head = "".join(f"<th>{number.title}</th>" for number, _ in columns)
    rows = "".join(
        f'<tr><th scope="row">{_swatch(index)}{escape(run.name)}</th>'
        + "".join(_cell(number, values, index) for number, values in columns)
        + f'<td><span class="badge {run.status.state}">{run.status.state}</span></td></tr>'
        for index, run in enumerate(runs)
    )
    return (
        '<section><h2>Numbers</h2><div class="wide"><table class="numbers">'
        f"<thead><tr><th>Run</th>{head}<th>State</th></tr></thead><tbody>{rows}</tbody>"
        "</table></div></section>"
    )


def _cell(number: Number, values: Sequence[float | None], index: int) -> str:
    value = values[index]
    if value is None:
        return f"<td>{NOTHING}</td>"
    comparable = [each for each in values if each is not None and each == each]
    is_best = number.best and len(comparable) > 1 and value == number.best(comparable)
    text = escape(number.show(value))
    return f"<td><strong>{text}</strong></td>" if is_best else f"<td>{text}</td>"


def _swatch(index: int) -> str:
    colour = f"c{index % NUM_COLOURS}"
    return (
        '<svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        f'<path class="line {colour}" d="M1 5H17"/></svg>'
    )


def _controls(runs: Sequence[Run]) -> str:
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{index}"{" checked" * (index == 0)}>'
        f"<span>{name}</span></label>"
        for index, name in enumerate(("Steps", "Tokens", "Time"))
    )
    legend = "".join(
        f'<label class="run"><input type="checkbox" data-run="{index}" checked>{_swatch(index)}'
        f"<span>{escape(run.name)}</span></label>"
        for index, run in enumerate(runs)
    )
    return (
        f'<div class="controls" id="controls"><div class="knobs" hidden><div class="choice" '
        f'role="radiogroup" aria-label="Horizontal axis">{axes}</div>'
        '<label class="slider">Smoothing <input id="smooth" type="range" min="0" max="0.98" '
        'step="0.01" value="0"><output id="smoothed">0</output></label>'
        '<button id="reset" type="button" disabled>Whole range</button>'
        '<span class="quiet hint">drag in a plot to zoom</span></div>'
        + (f'<div class="legend">{legend}</div>' if len(runs) > 1 else "")
        + "</div>"
    )


def _plots(plots: Sequence[tuple[Plot, list[Series]]], names: Sequence[str]) -> Iterator[str]:
    if not plots:
        yield "<section><p>No rows in metrics.jsonl yet.</p></section>"
    numbered = list(enumerate(plots))
    for section, group in groupby(numbered, key=lambda each: each[1][0].section):
        yield f'<section><h2>{escape(section)}</h2><div class="plots">'
        for index, (plot, series) in group:
            hero = " hero" if index == 0 else ""
            unit = f' <span class="quiet">{plot.unit}</span>' if plot.unit else ""
            picture = draw(plot, series, names, HERO_WIDTH if hero else 620)
            yield (
                f'<figure class="plot{hero}" data-plot="{index}"><figcaption>'
                f"<h3>{escape(plot.title)}{unit}</h3>{_key(series)}<label hidden>"
                f'<input type="checkbox" class="log"{" checked" * plot.log}>log</label>'
                f"</figcaption>{picture}</figure>"
            )
        yield "</div></section>"


def _key(series: Sequence[Series]) -> str:
    """Return the key of a plot that shows training and validation."""
    if len({one.dashed for one in series}) < 2:
        return ""
    return (
        '<span class="key quiet"><svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        '<path class="line ink" d="M1 5H17"/></svg>training '
        '<svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        '<path class="line ink dashed" d="M1 5H17"/></svg>validation</span>'
    )


def _times(runs: Sequence[Run]) -> str:
    bars = []
    for run in runs:
        busy, waiting, other = run.seconds()
        parts = (("compute", busy - waiting), ("data", waiting), ("other", other))
        whole = sum(seconds for _, seconds in parts)
        if not whole > 0:
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


def _differences(runs: Sequence[Run]) -> str:
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
    return NOTHING if value is None else f"<code>{escape(shown_value(value))}</code>"


def _facts(runs: Sequence[Run]) -> str:
    facts = [facts_of(run) for run in runs]
    keys = dict.fromkeys(key for each in facts for key in each)
    rows = [
        (key, [escape(each[key]) if key in each else NOTHING for each in facts]) for key in keys
    ]
    return _table("Facts", runs, rows)


def _table(title: str, runs: Sequence[Run], rows: Sequence[tuple[str, list[str]]]) -> str:
    """Return a table with a column a run; its cells are HTML already."""
    head = "".join(
        f'<th scope="col">{_swatch(index)}{escape(run.name)}</th>' for index, run in enumerate(runs)
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


def _recipe(run: Run) -> str:
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
