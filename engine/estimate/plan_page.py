"""A plan as one HTML page that needs nothing else and asks nobody. Torch-free.

What comes from recipes is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ..drawing.page import render_page
from ..parallel.pipeline.grid import Span, spans
from .plan import PipelinePlan, RunPlan

WIDTH = 1264
MOST_RANKS, MOST_SPANS = 512, 6000
"""more are not drawn"""
COLOURS = 8
STYLE = """
.cell { stroke: var(--card); }
svg text { fill: var(--ink); font-size: 11px; }
.cell + text { fill: light-dark(#fff, #0c1116); }
rect.c0, .F { fill: var(--c0); } rect.c1, .B { fill: var(--c1); } rect.c2, .I { fill: var(--c2); }
rect.c3, .W { fill: var(--c3); } rect.c4 { fill: var(--c4); } rect.c5 { fill: var(--c5); }
rect.c6 { fill: var(--c6); } rect.c7 { fill: var(--c7); }
.wide svg { display: block; width: 100%; height: auto; padding: 12px; }
"""


def draw_plan(found: RunPlan, name: str) -> str:
    """Return the page.

    Args:
        name: of the run.
    """
    title = f"Plan of {name}"
    body = "".join(_parts(found))
    return render_page(title, f"<header><h1>{escape(title)}</h1></header>\n{body}", STYLE)


def _parts(found: RunPlan) -> Iterator[str]:
    degrees = found.degrees.by_axis
    text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    yield f"<p>{found.degrees.world} ranks = {text or 'one rank'}</p>"
    for axis in (axis for axis, degree in degrees.items() if degree > 1):
        yield f"<h2>Ranks by place along {axis}, a row a node</h2>" + _wide(_mesh(found, axis))
    if found.pipeline:
        pipeline = found.pipeline
        waits = f"bubble {pipeline.bubble_fraction:.1%}"
        yield f"<h2>Pipeline: {escape(pipeline.schedule)}, {waits}</h2>"
        yield _wide(_timeline(pipeline))
        rows = [
            (number, stage.place, "{}-{}".format(*stage.blocks), f"{stage.cost:.2f}")
            for number, stage in enumerate(pipeline.stages)
        ]
        yield _table(("stage", "place", "blocks", "cost in blocks"), rows)
    yield "<h2>Held by the first rank at each place, bytes</h2>"
    held = [
        (f"{needs.place} {kind}", size)
        for needs in found.needs
        for kind, size in (("weights", needs.weight_bytes), ("optimizer", needs.optimizer_bytes))
    ]
    yield _wide(_bars(held))
    yield "<h2>Sent in a step to the next rank of a ring, bytes</h2>"
    flows = [
        (f"{needs.place} {' x '.join(flow.axes)} {flow.kind}, {flow.link}", flow.link_bytes)
        for needs in found.needs
        for flow in needs.flows
    ]
    yield _wide(_bars(flows))
    yield "<h2>Parameters</h2>"
    rows_of_parameters = [
        (
            each.name,
            _shape(each.placed.shape),
            _dim(each.placed.place.get("tensor")),
            _dim(each.placed.place.get("shard")),
            _shape(each.local_shape),
            f"{each.local_bytes:,}",
            each.placed.decided_by,
        )
        for each in found.placements
    ]
    head = ("name", "shape", "tensor", "shard", "local shape", "bytes", "decided by")
    yield _table(head, rows_of_parameters)


def _mesh(found: RunPlan, axis: str) -> str:
    """Return ranks as cells, coloured by their place along an axis."""
    node = min(found.gpus_per_node, found.degrees.world)
    ranks = min(found.degrees.world, MOST_RANKS)
    size = min(44.0, (WIDTH - 90) / node)
    rows = -(-ranks // node)
    cells = []
    for rank in range(ranks):
        row, column = divmod(rank, node)
        place = getattr(found.degrees.coordinate(rank), axis)
        cells.append(_rect(f"cell c{place % COLOURS}", 80 + column * size, row * 22, size, 22))
        if size >= 24:
            cells.append(f'<text x="{84 + column * size:.1f}" y="{row * 22 + 15}">{rank}</text>')
    cells += [f'<text x="0" y="{row * 22 + 15}">node {row}</text>' for row in range(rows)]
    left = found.degrees.world - ranks
    more = f'<text x="0" y="{rows * 22 + 15}">and {left} ranks more</text>' if left else ""
    return _svg(rows * 22 + (22 if left else 0), f"ranks along {axis}", [*cells, more])


def _timeline(pipeline: PipelinePlan) -> str:
    """Return when each rank does what."""
    rows: list[list[Span]] = spans(pipeline.grid, [stage.cost for stage in pipeline.stages])
    if sum(map(len, rows)) > MOST_SPANS:
        return "<p>Too long to draw.</p>"
    scale = (WIDTH - 80) / max(row[-1].end for row in rows)
    cells = []
    for place, row in enumerate(rows):
        cells.append(f'<text x="0" y="{place * 26 + 17}">place {place}</text>')
        for start, end, action in row:
            x, width = 70 + start * scale, (end - start) * scale
            title = f"<title>{action}</title>"
            cells.append(_rect(f"cell {action.kind}", x, place * 26, width, 24, title))
            if width >= 26:
                cells.append(f'<text x="{x + 3:.1f}" y="{place * 26 + 16}">{action}</text>')
    return _svg(len(rows) * 26, "timeline of the pipeline", cells)


def _bars(values: Sequence[tuple[str, int]]) -> str:
    most = max((value for _, value in values), default=0) or 1
    cells = []
    for row, (name, value) in enumerate(values):
        width = (WIDTH - 560) * value / most
        cells += [
            f'<text x="0" y="{row * 22 + 15}">{escape(name)}</text>',
            _rect("c0", 400, row * 22 + 3, width, 16),
            f'<text x="{406 + width:.1f}" y="{row * 22 + 15}">{value:,}</text>',
        ]
    return _svg(len(values) * 22, "bars", cells)


def _rect(kind: str, x: float, y: float, width: float, height: float, inside: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}>{inside}</rect>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def _wide(inside: str) -> str:
    return f'<div class="wide">{inside}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(str(each))}</td>" for each in row) + "</tr>" for row in rows
    )
    return _wide(f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _dim(dim: int | None) -> str:
    return "-" if dim is None else f"dim {dim}"
