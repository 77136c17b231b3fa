"""`trainer data merge`: the parts that several machines prepared become one corpus."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from ..engine.core.errors import RecipeError
from .data_text import describe_prepared, format_prepared
from .options import AsJson
from .table import echo

Dedup = Annotated[
    str,
    typer.Option(
        metavar="exact|near[:SHARE]",
        help="leave out documents that are there already: with equal tokens, or nearly so",
    ),
]


def merge(
    parts: Annotated[
        list[Path], typer.Argument(metavar="PART", help="folders that prepare --part made, all")
    ],
    out: Annotated[Path, typer.Option(help="folder to create")],
    dedup: Dedup = "",
    as_json: AsJson = False,
) -> None:
    """Merge the parts of a corpus into the folder that one machine would have made of it."""
    from ..engine.corpus.merging.duplicates import parse_dedup
    from ..engine.corpus.merging.merge import merge_parts
    from ..engine.corpus.progress import show_progress

    started = time.monotonic()
    with show_progress() as watch:
        is_new = merge_parts(parts, out, parse_dedup(dedup), watch)
    row = describe_prepared(out, is_new, started)
    echo(json.dumps([row], indent=1) if as_json else format_prepared(row))


def parse_part(text: str) -> tuple[int, int]:
    """Return the number and the count of `I/N`; of an empty text 1 and 1.

    Raises:
        RecipeError: it is no such pair, or I is not from 1 to N.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text or "1/1", re.ASCII)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= of:
        raise RecipeError(f"--part {text}: expected I/N with I from 1 to N", "such as --part 1/4")
    return number, of
