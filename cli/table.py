"""Plain tables: aligned columns, the last one wrapped to the terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from shutil import get_terminal_size

from ..engine.core.errors import Problem
from ..engine.core.text.display import make_lines_printable, make_printable

GAP = "  "


def echo(text: str = "", *, err: bool = False) -> None:
    """Print text with words of others: nothing in it acts upon a terminal."""
    print(make_lines_printable(text), file=sys.stderr if err else sys.stdout)


def print_warnings(warnings: Iterable[Problem]) -> None:
    """Print a line for each warning about a recipe."""
    for warning in warnings:
        echo(f"warning: {warning.describe()}", err=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of equal length; in a pipe nothing is wrapped."""
    if rows:
        print(table_text(rows))


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of equal length, wrapped if they go to a terminal."""
    rows = [[make_printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)][:-1]
    indent = sum(widths) + len(GAP) * len(widths)
    terminal = get_terminal_size().columns if sys.stdout.isatty() else 0
    found = []
    for *cells, last in rows:
        left = "".join(cell.ljust(width) + GAP for cell, width in zip(cells, widths, strict=True))
        lines = [last]
        if terminal >= indent + 20:
            lines = textwrap.wrap(last, terminal - indent) or [""]
        found.append(f"{left}{lines[0]}".rstrip())
        found += [" " * indent + line for line in lines[1:]]
    return "\n".join(found)
