"""Reads pipeline schedules from files in torch's CSV format without communication. Torch-free.

A row is a rank, and a cell is a pass of a micro batch through a stage (see `grid.Grid`) or empty.
Files are not trusted: their size is bounded, and each mistake is found before a process starts.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...core.errors import Problem, RecipeError
from ...core.files import open_regular
from .grid import Action, Deadlock, parse, simulate, split_backward

MAX_BYTES = 16 * 2**20
KEY = "parallel.pipelining.csv"


@dataclass(frozen=True)
class ScheduleFile:
    """A valid schedule: each stage runs each micro batch once, and no rank waits forever.

    Attributes:
        rows: the actions of each rank, in order.
        stage_to_rank: the rank that holds each stage.
        micro_batches: micro batches of a step.
    """

    rows: list[list[Action]]
    stage_to_rank: tuple[int, ...]
    micro_batches: int

    @property
    def splits_backward(self) -> bool:
        """Whether some gradients of inputs and of weights are computed in separate passes."""
        return any(action.kind == "W" for row in self.rows for action in row)

    @property
    def late_gradient(self) -> Action | None:
        """The last stage's first action after stage 0 has ended, if one rank holds both stages.

        With tied embeddings it is an error.
        """
        # A tied weight is in stage 0's FSDP unit alone, which reduces its gradient when stage 0
        # ends: what the last stage adds later would be missing.
        row, last = self.rows[self.stage_to_rank[0]], len(self.stage_to_rank) - 1
        end = max(number for number, action in enumerate(row) if action.stage == 0)
        return next((action for action in row[end:] if action.stage == last), None)


class _Cell(NamedTuple):
    line: int
    column: int
    action: Action

    def __str__(self) -> str:
        return f"row {self.line}, cell {self.column}: {self.action}"


def read_schedule(path: Path) -> ScheduleFile:
    """Read a schedule file and check it.

    Raises:
        RecipeError: the file cannot be read, or the schedule would not compute a step; the message
            names row and cell, counted from 1.
    """
    try:
        with open_regular(path) as file:
            # One byte more than allowed: a longer file is refused and never read whole.
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise _fault(f"{path} has more than {MAX_BYTES:,} bytes")
        rows = list(_rows(text.decode("utf-8-sig")))
        return _checked(rows)
    except OSError as error:
        raise _fault(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _fault(f"{path} is no text of comma-separated cells: {error}") from error
    except _Mistake as mistake:
        raise _fault(f"{path.name}: {mistake.message}", mistake.hint) from mistake


class _Mistake(Exception):
    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def _fault(message: str, hint: str = "") -> RecipeError:
    return RecipeError([Problem(message, KEY, hint=hint)])


def _rows(text: str) -> Iterator[list[_Cell]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    for row in reader:
        if any(cell.strip() for cell in row):
            cells = enumerate(map(str.strip, row), 1)
            yield [
                _Cell(reader.line_num, column, action)
                for column, cell in cells
                for action in _actions(cell, f"row {reader.line_num}, cell {column}")
            ]


def _actions(cell: str, place: str) -> list[Action]:
    """Return the actions of a cell; DualPipeV's cells in torch hold two, done one by one."""
    shared = re.fullmatch(r"\((.*)\)OVERLAP_F_B", cell)
    words = (shared[1] if shared else cell).split(";") if cell else []
    actions = [parse(word) for word in words]
    if None in actions:
        raise _Mistake(
            f"{place}: {cell[:40]!r} is no action",
            "write the stage, F, B, I or W, and the micro batch, such as 0F3; no communication",
        )
    return [action for action in actions if action]


def _checked(rows: Sequence[Sequence[_Cell]]) -> ScheduleFile:
    stage_to_rank = _assigned_ranks(rows)
    micro_batches = 1 + max(cell.action.micro_batch for row in rows for cell in row)
    _check_passes(rows, len(stage_to_rank), micro_batches)
    _check_losses(rows[stage_to_rank[-1]], len(stage_to_rank) - 1)
    actions = [[cell.action for cell in row] for row in rows]
    try:
        # Last, because it assumes that every action is there once.
        simulate(actions, len(stage_to_rank))
    except Deadlock as error:
        stuck = [rows[rank][number] for rank, number in error.waiting.items()]
        shown = "; ".join(map(str, stuck[:4]))
        raise _Mistake(
            f"ranks wait for each other for ever, at {shown}",
            "a forward follows that of the stage before, a backward that of the stage behind",
        ) from error
    return ScheduleFile(actions, stage_to_rank, micro_batches)


def _assigned_ranks(rows: Sequence[Sequence[_Cell]]) -> tuple[int, ...]:
    stage_to_rank: dict[int, int] = {}
    first: dict[int, _Cell] = {}
    for rank, row in enumerate(rows):
        for cell in row:
            stage = cell.action.stage
            if stage_to_rank.setdefault(stage, rank) != rank:
                raise _Mistake(f"{cell}: stage {stage} is another rank's ({first[stage]})")
            first.setdefault(stage, cell)
    if not stage_to_rank:
        raise _Mistake("no action is in it")
    missing = next(stage for stage in range(len(stage_to_rank) + 1) if stage not in stage_to_rank)
    if missing < len(stage_to_rank):
        raise _Mistake(f"stage {missing} is nowhere, and stage {max(stage_to_rank)} is")
    return tuple(stage_to_rank[stage] for stage in range(len(stage_to_rank)))


def _check_passes(rows: Sequence[Sequence[_Cell]], stages: int, micro_batches: int) -> None:
    """Require that each stage runs F, I and W of each micro batch once, where B is I and W."""
    seen: dict[Action, _Cell] = {}
    for row in rows:
        for cell in row:
            for half in split_backward(cell.action):
                if half in seen:
                    raise _Mistake(f"{cell} is done already ({seen[half]})")
                seen[half] = cell
    if len(seen) < 3 * stages * micro_batches:
        every = (
            Action(stage, kind, m)
            for stage in range(stages)
            for m in range(micro_batches)
            for kind in "FIW"
        )
        missing = next(each for each in every if each not in seen)
        also = {"F": "", "I": f" (nor {missing._replace(kind='B')})"}.get(missing.kind, "")
        raise _Mistake(f"{missing} is nowhere{also}", "each stage does F, and B or I and W, of all")


def _check_losses(row: Sequence[_Cell], last: int) -> None:
    # torch (2.13) appends each loss to a list and reads them by the number of the micro batch.
    forward = [c for c in row if c.action.stage == last and c.action.kind == "F"]
    for number, cell in enumerate(forward):
        if cell.action.micro_batch != number:
            raise _Mistake(
                f"{cell}: the last stage's forward passes must come in order",
                f"{cell.action._replace(micro_batch=number)} is next",
            )
