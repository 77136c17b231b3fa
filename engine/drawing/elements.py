"""Parts of pages: tables, SVG shapes, scales with round ticks, and short numbers. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

NUM_COLOURS = 8
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), kind: str = "") -> str:
    """Return a table in a box that scrolls sideways.

    Args:
        rows: cells that are HTML already; the first cell of a row is the row's header.
        head: titles of the columns, HTML already; empty for none.
        kind: CSS class of the table.
    """
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    lines = "".join(
        f'<tr><th scope="row">{name}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for name, *cells in rows
    )
    return (
        f'<div class="wide"><table class="{kind}">'
        + (f"<thead><tr>{titles}</tr></thead>" if head else "")
        + f"<tbody>{lines}</tbody></table></div>"
    )


def section(title: str, content: str) -> str:
    """Return a part of a page with a title of plain text."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def svg(width: float, height: float, label: str, shapes: Iterable[str]) -> str:
    """Return a picture with a label for readers that cannot see it."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}"'
    return f"<svg {box}>{''.join(shapes)}</svg>"


def rect(kind: str, x: float, y: float, width: float, height: float, tooltip: object = "") -> str:
    """Return a rectangle of a CSS class."""
    sides = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    inside = f"<title>{tooltip}</title>" if tooltip else ""
    return f'<rect class="{kind}" {sides}>{inside}</rect>'


def text(x: float, y: float, content: object) -> str:
    """Return a line of text that starts at a point."""
    return f'<text x="{x:.1f}" y="{y:.0f}">{escape(str(content))}</text>'


class Scale:
    """Maps a range of values to a range of coordinates along a line."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._start = start
        self._factor = (end - start) / (self.high - self.low)

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        return self._start + (value - self.low) * self._factor


def visible(values: Sequence[float]) -> tuple[float, float]:
    """Return the range to show: of all values, unless a few lie far above all the others."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    if high - usual > 4 * (usual - low) > 0:
        high = usual + 0.25 * (usual - low)
    return low, high


def padded(low: float, high: float) -> tuple[float, float]:
    """Return the range with some room above and below, and never an empty one."""
    room = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
    return low - room, high + room


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers inside a range."""
    rough = (high - low) / count
    if not (rough > 0 and math.isfinite(rough)):
        return []
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((m * unit for m in (1, 2, 5) if m * unit >= rough), 10 * unit)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)][:50]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the logarithms of round numbers between two logarithms."""
    decades = high - low
    if decades < 1:
        return [math.log10(tick) for tick in ticks(10**low, 10**high, 4) if tick > 0]
    marks = (1, 2, 5) if decades < 3 else (1,)
    exponents = range(math.floor(low), math.ceil(high) + 1, math.ceil(decades / 6))
    candidates = [exponent + math.log10(mark) for exponent in exponents for mark in marks]
    return [tick for tick in candidates if low <= tick <= high]


def format_short(value: float) -> str:
    """Return a number in few characters: `0`, `1.25`, `3e-4`, `25k`."""
    size = abs(value)
    if size == 0 or not math.isfinite(size):
        return format(value, ".4g")
    for unit, letter in _UNITS:
        if unit <= size < 1e15:
            scale = 1e3 if letter == "k" else unit
            return f"{value / scale:.4g}{letter}"
    if 1e-3 <= size < 1e4:
        return format(value, ".4g")
    mantissa, _, exponent = format(value, ".2e").partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
