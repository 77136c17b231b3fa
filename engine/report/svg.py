"""A plot as SVG: what the page shows until its script draws anew, and where scripts are off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from .plots import Plot, Series

WIDTH, HEIGHT = 620, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 28
NUM_COLOURS = 8
MAX_MARKERS = 60
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))


def draw(plot: Plot, series: Sequence[Series], names: Sequence[str], width: int = WIDTH) -> str:
    """Return a picture over optimizer steps with a linear scale, or a logarithmic one.

    Args:
        names: of the runs, for readers that cannot see it.
    """
    height = HEIGHT if width == WIDTH else 330
    xs = [x for one in series for x in one.step]
    ys = [y for one in series for y in one.y if y is not None and (y > 0 or not plot.log)]
    low, high = (0.0, 1.0) if not ys else visible(ys)
    to_scale = math.log10 if plot.log and ys else float
    across = _Scale(min(xs), max(xs), LEFT, width - RIGHT)
    bottom = height - BOTTOM
    down = _Scale(*padded(to_scale(low), to_scale(high)), bottom, TOP)
    body = [*_grid(across, down, plot.log, width, bottom)]
    if high < max(ys, default=0.0):
        note = f"&uarr; up to {shown(max(ys))}"
        body.append(f'<text class="tick end" x="{width - RIGHT}" y="{TOP}">{note}</text>')
    for one in series:
        places = [
            None if y is None or (plot.log and y <= 0) else (across(x), down(to_scale(y)))
            for x, y in zip(one.step, one.y, strict=True)
        ]
        body += _line(one, places)
    runs = ", ".join(dict.fromkeys(names[one.run] for one in series))
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(plot.title)} of {escape(runs)}">{"".join(body)}</svg>'
    )


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
    found = [exponent + math.log10(mark) for exponent in exponents for mark in marks]
    return [tick for tick in found if low <= tick <= high]


def shown(value: float) -> str:
    """Return a number shortly: `0`, `1.25`, `3e-4`, `25k`."""
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


class _Scale:
    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._start = start
        self._factor = (end - start) / (self.high - self.low)

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) * self._factor


def _grid(across: _Scale, down: _Scale, log: bool, width: int, bottom: int) -> Iterator[str]:
    for tick in log_ticks(down.low, down.high) if log else ticks(down.low, down.high, 4):
        y, label = down(tick), shown(10**tick if log else tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{width - RIGHT}"/>'
        yield f'<text class="tick end" x="{LEFT - 8}" y="{y + 3.5:.1f}">{label}</text>'
    for tick in ticks(across.low, across.high, 6):
        x = across(tick)
        yield f'<text class="tick mid" x="{x:.1f}" y="{bottom + 18}">{shown(tick)}</text>'
    yield f'<path class="axis" d="M{LEFT} {bottom}H{width - RIGHT}"/>'


def _line(one: Series, places: Sequence[tuple[float, float] | None]) -> Iterator[str]:
    colour = f"c{one.run % NUM_COLOURS}" + (" dashed" if one.dashed else "")
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
