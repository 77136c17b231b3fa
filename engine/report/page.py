"""Writes the report as a single HTML file that loads no other files. Torch-free.

All text that comes from the files of a run is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from ..drawing.elements import (
    Scale,
    format_short,
    log_ticks,
    padded,
    section,
    svg,
    ticks,
    visible,
)
from ..drawing.page import render_page
from .plots import Plot, Series, plots_of
from .runs import RunData, names_of, read_run
from .tables import (
    facts,
    numbers,
    numbers_of,
    profiles,
    recipe_differences,
    swatch,
    times,
    whole_recipe,
)

WIDTH, HEIGHT, HERO_WIDTH, HERO_HEIGHT = 620, 230, 1264, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 28
MAX_MARKERS = 60
_STATES = {"running", "finished", "stopped", "failed", "died"}


def write_page(paths: Sequence[Path], title: str = "") -> str:
    """Return the HTML of the report on run directories.

    Args:
        paths: the run directories.
        title: title of the page; empty takes the run's name or the number of runs.
    """
    names = names_of(paths)
    runs = [read_run(path, name) for path, name in zip(paths, names, strict=True)]
    title = title or (names[0] if len(runs) == 1 else f"{len(runs)} runs compared")
    plots = plots_of(runs)
    data = {"runs": names, "plots": [_plot_data(plot, series) for plot, series in plots]}
    body = "".join(
        [
            _header(runs, title),
            _cards(runs) if len(runs) == 1 else numbers(runs),
            _controls(runs),
            *_plots(plots, names),
            times(runs),
            profiles(runs),
            recipe_differences(runs) if len(runs) > 1 else "",
            facts(runs),
            whole_recipe(runs[0]) if len(runs) == 1 else "",
        ]
    )
    return render_page(title, body, data=data)


def _plot_data(plot: Plot, series: Sequence[Series]) -> dict[str, Any]:
    return {
        "title": plot.title,
        "unit": plot.unit,
        "log": plot.log,
        "series": [one.as_json() for one in series],
    }


def _header(runs: Sequence[RunData], title: str) -> str:
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


def _cards(runs: Sequence[RunData]) -> str:
    cards = "".join(
        f"<div><dt>{escape(number.title)}</dt><dd>{escape(number.show(value))}</dd></div>"
        for number, values in numbers_of(runs)
        if (value := values[0]) is not None
    )
    return f'<dl class="cards">{cards}</dl>'


def _controls(runs: Sequence[RunData]) -> str:
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{index}"{" checked" * (index == 0)}>'
        f"<span>{name}</span></label>"
        for index, name in enumerate(("Steps", "Tokens", "Time"))
    )
    legend = "".join(
        f'<label class="run"><input type="checkbox" data-run="{index}" checked>{swatch(index)}'
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
    for title, group in groupby(numbered, key=lambda item: item[1][0].section):
        figures = ""
        for index, (plot, series) in group:
            hero = " hero" if index == 0 else ""
            unit = f' <span class="quiet">{plot.unit}</span>' if plot.unit else ""
            size = (HERO_WIDTH, HERO_HEIGHT) if hero else (WIDTH, HEIGHT)
            picture = _draw(plot, series, names, *size)
            figures += (
                f'<figure class="plot{hero}" data-plot="{index}"><figcaption>'
                f"<h3>{escape(plot.title)}{unit}</h3>{_key(series)}<label hidden>"
                f'<input type="checkbox" class="log"{" checked" * plot.log}>log</label>'
                f"</figcaption>{picture}</figure>"
            )
        yield section(title, f'<div class="plots">{figures}</div>')


def _key(series: Sequence[Series]) -> str:
    """Return the legend of a plot with training and validation curves, else an empty text."""
    if len({one.dashed for one in series}) < 2:
        return ""
    return (
        '<span class="key quiet"><svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        '<path class="line ink" d="M1 5H17"/></svg>training '
        '<svg class="swatch" viewBox="0 0 18 10" aria-hidden="true">'
        '<path class="line ink dashed" d="M1 5H17"/></svg>validation</span>'
    )


def _draw(
    plot: Plot, series: Sequence[Series], names: Sequence[str], width: int, height: int
) -> str:
    """Return a plot over optimizer steps as SVG, which the page shows until its script redraws it.

    Args:
        plot: the plot, whose `log` selects a logarithmic vertical axis.
        series: the curves.
        names: the runs' names, for the accessible title.
        width: width in pixels.
        height: height in pixels.
    """
    xs = [x for one in series for x in one.step]
    ys = [y for one in series for y in one.y if y is not None and (y > 0 or not plot.log)]
    low, high = visible(ys) if ys else (0.0, 1.0)
    to_scale = math.log10 if plot.log and ys else float
    across = Scale(min(xs), max(xs), LEFT, width - RIGHT)
    bottom = height - BOTTOM
    down = Scale(*padded(to_scale(low), to_scale(high)), bottom, TOP)
    shapes = [*_grid(across, down, plot.log, width, bottom)]
    if high < max(ys, default=0.0):
        note = f"&uarr; up to {format_short(max(ys))}"
        shapes.append(f'<text class="tick end" x="{width - RIGHT}" y="{TOP}">{note}</text>')
    for one in series:
        points = [
            None if y is None or (plot.log and y <= 0) else (across(x), down(to_scale(y)))
            for x, y in zip(one.step, one.y, strict=True)
        ]
        shapes += _line(one, points)
    runs = ", ".join(dict.fromkeys(names[one.run] for one in series))
    return svg(width, height, f"{plot.title} of {runs}", shapes)


def _grid(across: Scale, down: Scale, log: bool, width: int, bottom: int) -> Iterator[str]:
    for tick in log_ticks(down.low, down.high) if log else ticks(down.low, down.high, 4):
        y, label = down(tick), format_short(10**tick if log else tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>'
        yield f'<text class="tick end" x="{LEFT - 8}" y="{y + 3.5:.1f}">{label}</text>'
    for tick in ticks(across.low, across.high, 6):
        x = across(tick)
        yield f'<text class="tick mid" x="{x:.1f}" y="{bottom + 18}">{format_short(tick)}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}H{width - RIGHT}"/>'


def _line(one: Series, places: Sequence[tuple[float, float] | None]) -> Iterator[str]:
    colour = f"c{one.colour}" + (" dashed" if one.dashed else "")
    path, pen = "", "M"
    for place in places:
        if place is None:
            pen = "M"
            continue
        path += f"{pen}{place[0]:.1f} {min(max(place[1], -500.0), 999.0):.1f}"
        pen = "L"
    yield f'<path class="line {colour}" d="{path}"/>'
    points = [place for place in places if place is not None]
    if len(points) <= MAX_MARKERS and (one.dashed or len(points) == 1):
        for x, y in points:
            yield f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
