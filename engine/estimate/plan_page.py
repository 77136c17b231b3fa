"""A plan as one HTML page that needs nothing else and loads nothing. Torch-free.

Texts from recipes are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..drawing import elements
from ..drawing.elements import NUM_COLOURS, rect, section, svg, text
from ..drawing.page import render_page
from ..parallel.pipeline.grid import spans
from . import plan_tables

if TYPE_CHECKING:
    from .plan import PipelinePlan, RunPlan

WIDTH = 1264
MOST_RANKS, MOST_SPANS = 512, 6000
"""more are not drawn"""
STYLE = """
.cell { stroke: var(--card); }
svg text { fill: var(--ink); font-size: 11px; }
.cell + text { fill: light-dark(#fff, #0c1116); }
rect.c0, .F { fill: var(--c0); } rect.c1, .B { fill: var(--c1); } rect.c2, .I { fill: var(--c2); }
rect.c3, .W { fill: var(--c3); } rect.c4 { fill: var(--c4); } rect.c5 { fill: var(--c5); }
rect.c6 { fill: var(--c6); } rect.c7 { fill: var(--c7); }
.wide svg { display: block; width: 100%; height: auto; padding: 12px; }
"""


def draw_plan(plan: RunPlan, name: str) -> str:
    """Return the page of a run's plan; `name` is the run's."""
    title = f"Plan of {name}"
    body = f"<header><h1>{escape(title)}</h1></header>\n{''.join(_sections(plan))}"
    return render_page(title, body, STYLE)


def _sections(plan: RunPlan) -> Iterator[str]:
    yield f"<p>{plan_tables.describe_mesh(plan)}</p>"
    if plan.row_lengths:
        yield f"<p>{plan.row_lengths}</p>"
    for axis in (axis for axis, degree in plan.degrees.by_axis.items() if degree > 1):
        yield section(f"Ranks by place along {axis}, a row a node", _mesh(plan, axis))
    if plan.groups:
        yield section("Process groups", _table(plan_tables.group_rows(plan)))
    if pipeline := plan.pipeline:
        stages = _table(plan_tables.stage_rows(pipeline))
        yield section(plan_tables.describe_pipeline(pipeline), _timeline(pipeline) + stages)
    held = [
        (f"{cost.place} {kind}", size)
        for cost in plan.needs
        for kind, size in (("weights", cost.weight_bytes), ("optimizer", cost.optimizer_bytes))
    ]
    costs = _table(plan_tables.cost_rows(plan))
    yield section("Held by the first rank at each place, bytes", _bars(held) + costs)
    flows = [
        (f"{cost.place} {' x '.join(flow.axes)} {flow.kind}, {flow.link}", flow.link_bytes)
        for cost in plan.needs
        for flow in cost.flows
    ]
    sent = _table(plan_tables.flow_rows(plan))
    yield section("Sent in a step to the next rank of a ring, bytes", _bars(flows) + sent)
    yield section("Parameters", _table(plan_tables.placement_rows(plan)))


def _table(rows: plan_tables.Rows) -> str:
    head, *body = ([escape(cell) for cell in row] for row in rows)
    return elements.table(body, head)


def _picture(height: float, label: str, shapes: Sequence[str]) -> str:
    return f'<div class="wide">{svg(WIDTH, height, label, shapes)}</div>'


def _mesh(plan: RunPlan, axis: str) -> str:
    """Return the ranks as table cells, coloured by the coordinate on an axis."""
    world = plan.degrees.world
    node, ranks = min(plan.gpus_per_node, world), min(world, MOST_RANKS)
    size = min(44.0, (WIDTH - 90) / node)
    rows = -(-ranks // node)
    shapes = []
    for rank in range(ranks):
        row, column = divmod(rank, node)
        colour = getattr(plan.degrees.coordinate(rank), axis) % NUM_COLOURS
        shapes.append(rect(f"cell c{colour}", 80 + column * size, row * 22, size, 22))
        if size >= 24:
            shapes.append(text(84 + column * size, row * 22 + 15, rank))
    shapes += [text(0, row * 22 + 15, f"node {row}") for row in range(rows)]
    if world > ranks:
        shapes.append(text(0, rows * 22 + 15, f"and {world - ranks} ranks more"))
    return _picture((rows + (world > ranks)) * 22, f"ranks along {axis}", shapes)


def _timeline(pipeline: PipelinePlan) -> str:
    """Return a chart of each rank's actions over time."""
    rows = spans(pipeline.grid, [stage.cost for stage in pipeline.stages])
    if sum(map(len, rows)) > MOST_SPANS:
        return "<p>Too long to draw.</p>"
    scale = (WIDTH - 80) / max(row[-1].end for row in rows)
    shapes = []
    for place, row in enumerate(rows):
        shapes.append(text(0, place * 26 + 17, f"place {place}"))
        for start, end, action in row:
            x, width = 70 + start * scale, (end - start) * scale
            shapes.append(rect(f"cell {action.kind}", x, place * 26, width, 24, action))
            if width >= 26:
                shapes.append(text(x + 3, place * 26 + 16, action))
    return _picture(len(rows) * 26, "timeline of the pipeline", shapes)


def _bars(values: Sequence[tuple[str, int]]) -> str:
    most = max((value for _, value in values), default=0) or 1
    shapes = []
    for row, (name, value) in enumerate(values):
        width = (WIDTH - 560) * value / most
        shapes += [
            text(0, row * 22 + 15, name),
            rect("c0", 400, row * 22 + 3, width, 16),
            text(406 + width, row * 22 + 15, f"{value:,}"),
        ]
    return _picture(len(values) * 22, "bars", shapes)
