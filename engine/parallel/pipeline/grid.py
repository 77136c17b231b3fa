"""Schedules of a pipeline as grids: the order of actions, their times, and the bubble.

Torch-free but for the schedules that torch alone knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Grid = list[list[str | None]]
"""For each rank, its cells in order of time, as in torch's schedule files: `0F3` is stage 0,
forward, micro batch 3. Besides `F` there are `B` (backward) and its two halves: `I` computes the
gradients of inputs, `W` those of weights. None: the rank is idle."""

LENGTHS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
"""duration of each kind in units of a forward pass: each half of a backward pass has as many
matmuls as the forward pass"""


class Action(NamedTuple):
    """One pass of a micro batch through a stage: `kind` is `F`, `B`, `I` or `W`."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        """Return the action as a cell, such as `0F3`."""
        return f"{self.stage}{self.kind}{self.micro_batch}"


class Span(NamedTuple):
    """An action with its start and end time."""

    start: float
    end: float
    action: Action


class Deadlock(Exception):
    """Ranks of a schedule wait forever for each other's actions.

    Attributes:
        waiting: for each stuck rank, the index in its row of the action that never starts.
    """

    def __init__(self, waiting: dict[int, int]) -> None:
        super().__init__("ranks wait for each other for ever")
        self.waiting = waiting


def parse(cell: str) -> Action | None:
    """Return the action that a cell stands for, or None if it is no pass of a micro batch."""
    found = re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,6})", cell)
    return Action(int(found[1]), found[2], int(found[3])) if found else None


def schedule_grid(schedule: str, ranks: int, stages: int, micro_batches: int) -> Grid:
    """Return the schedule of a pipeline as a grid, each action one cell long.

    Args:
        schedule: a name of torch.distributed.pipelining.
        ranks: number of ranks of the pipeline.
        stages: number of stages of all ranks.
        micro_batches: number of micro batches of a step.
    """
    # torch 2.13 runs 1F1B rightly, but its list of actions lacks the last rank's forward pass 0.
    own = {"GPipe": _gpipe, "1F1B": _one_forward_one_backward}.get(schedule)
    rows = (
        [own(rank, ranks, micro_batches) for rank in range(ranks)]
        if own
        else _rows_of_torch(schedule, ranks, stages, micro_batches)
    )
    grid: Grid = []
    # Every action has length 1 here, so that starts are whole numbers and index the cells.
    for row in simulate(rows, stages):
        cells: list[str | None] = []
        for span in row:
            cells += [None] * (int(span.start) - len(cells))
            cells.append(str(span.action))
        grid.append(cells)
    return grid


def spans(grid: Grid, costs: Sequence[float] = ()) -> list[list[Span]]:
    """Return the start and end of each rank's actions, each of which starts as early as possible.

    Args:
        grid: the schedule; only the order of each rank's actions counts.
        costs: time of each stage's forward pass, without communication; default: 1.

    Raises:
        Deadlock: ranks wait for each other.
    """
    rows = [[action for cell in row if cell and (action := parse(cell))] for row in grid]
    stages = 1 + max((action.stage for row in rows for action in row), default=-1)
    return simulate(rows, stages, LENGTHS, costs)


def bubble_fraction(grid: Grid, costs: Sequence[float] = ()) -> float:
    """Return the fraction of the step that ranks are idle; see `spans` for the arguments."""
    rows = spans(grid, costs)
    length = max(row[-1].end for row in rows)
    busy = sum(span.end - span.start for row in rows for span in row)
    return 1 - busy / (length * len(rows))


def _gpipe(rank: int, _: int, micro_batches: int) -> list[Action]:
    """Return a rank's actions: all forward, then all backward (arXiv:1811.06965)."""
    return [Action(rank, kind, m) for kind in "FB" for m in range(micro_batches)]


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return a rank's actions (arXiv:1806.03377).

    Forward passes fill the following ranks first; then backward and forward passes alternate.
    """
    ahead = min(micro_batches, ranks - rank)
    actions = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(micro_batches):
        actions.append(Action(rank, "B", m))
        if m + ahead < micro_batches:
            actions.append(Action(rank, "F", m + ahead))
    return actions


def _rows_of_torch(
    schedule: str, ranks: int, stages: int, micro_batches: int
) -> list[list[Action]]:
    from types import SimpleNamespace
    from typing import Any

    from torch.distributed.pipelining.schedules import get_schedule_class

    # A stand-in for PipelineStage, which needs process groups: only these attributes are read.
    stage = SimpleNamespace(group_rank=0, group_size=ranks, num_stages=stages, submod=None)
    kind: Any = get_schedule_class(schedule)
    built = kind([stage] * (stages // ranks), micro_batches)
    rows = []
    for rank in range(ranks):
        row: list[Action] = []
        for each in built.pipeline_order[rank]:
            # DualPipeV pairs a forward and a backward pass in one action. None is an idle turn.
            for action in (each and each.sub_actions) or [each]:
                found = action and parse(str(action))
                row += [found] if found else []
        rows.append(row)
    return rows


def simulate(
    rows: Sequence[Sequence[Action]],
    stages: int,
    lengths: Mapping[str, float] | None = None,
    costs: Sequence[float] = (),
) -> list[list[Span]]:
    """Return the start and end of each rank's actions, each of which starts as early as possible.

    Args:
        rows: the actions of each rank, in order.
        stages: number of stages of all ranks.
        lengths: duration of each kind of action; default: 1 for all.
        costs: factor of each stage's durations; default: 1 for all.

    Raises:
        Deadlock: ranks wait for each other.
    """
    ends: dict[Action, float] = {}
    done: list[list[Span]] = [[] for _ in rows]
    left = {rank: row for rank, row in enumerate(rows) if row}
    while left:
        before = len(ends)
        for rank, row in list(left.items()):
            mine = done[rank]
            for action in row[len(mine) :]:
                awaited = prerequisites(action, stages)
                if not all(each in ends for each in awaited):
                    break
                start = max([mine[-1].end if mine else 0.0, *(ends[each] for each in awaited)])
                length = lengths[action.kind] if lengths else 1.0
                end = start + length * (costs[action.stage] if costs else 1.0)
                # A whole backward pass ends both halves, so that others may wait for either.
                ends |= dict.fromkeys(split_backward(action), end)
                mine.append(Span(start, end, action))
            if len(mine) == len(row):
                del left[rank]
        if len(ends) == before:
            raise Deadlock({rank: len(done[rank]) for rank in left})
    return done


def prerequisites(action: Action, stages: int) -> list[Action]:
    """Return the actions that must end before an action starts, with B given as I and W."""
    stage, kind, m = action
    if kind == "F":
        return [Action(stage - 1, "F", m)] if stage else []
    if kind == "W":
        return [Action(stage, "I", m)]
    # Only the next stage's input gradient is waited for: its weight gradient stays there.
    behind = [Action(stage + 1, "I", m)] if stage + 1 < stages else []
    return [Action(stage, "F", m), *behind]


def split_backward(action: Action) -> list[Action]:
    """Return the halves I (gradients of inputs) and W (of weights) of B; else the action itself."""
    return [action._replace(kind=kind) for kind in ("IW" if action.kind == "B" else action.kind)]
