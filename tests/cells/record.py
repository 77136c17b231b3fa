"""The committed record of the cells that passed: `passed.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from hashlib import sha256
from pathlib import Path

from tests.cells.draw import CELLS

PASSED = Path(__file__).with_name("passed.toml")
DIGEST = sha256(Path(__file__).with_name("draw.py").read_bytes()).hexdigest()[:12]
"""version of what draws the cells: with another one, a number means another cell"""
NOTE = """# Cells that equal one process; written by `python -m tests.cells record`.
# draws: the version of draw.py; with another one, a number means another cell.
"""


def add_results(path: Path, results: Mapping[int, bool], day: date, torch: str) -> None:
    """Write results into the record; those of another version of `draw.py` are dropped.

    Args:
        path: the record, which need not exist.
        results: whether each cell passed.
        day: when.
        torch: the version of torch.
    """
    kept = [entry for entry in read_entries(path) if entry["torch"] != torch]
    same = [entry for entry in read_entries(path) if entry["torch"] == torch]
    passed = {number for entry in same for number in parse_ranges(entry["passed"])}
    failed = {number for entry in same for number in parse_ranges(entry["failed"])}
    passed |= {number for number, is_equal in results.items() if is_equal}
    failed |= {number for number, is_equal in results.items() if not is_equal}
    # The newest result of a cell counts.
    passed -= {number for number, is_equal in results.items() if not is_equal}
    failed -= {number for number, is_equal in results.items() if is_equal}
    entry = {"date": day, "torch": torch, "passed": render(passed), "failed": render(failed)}
    lines = [f'{NOTE}draws = "{DIGEST}"']
    for one in [*kept, entry]:
        lines += ["", "[[run]]", f"date = {one['date'].isoformat()}"]
        lines += [f'{key} = "{one[key]}"' for key in ("torch", "passed", "failed")]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def read_entries(path: Path) -> list[dict[str, object]]:
    """Return the entries of the present version of `draw.py`."""
    table = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    return table.get("run", []) if table.get("draws") == DIGEST else []


def describe(path: Path) -> str:
    """Return the record in words."""
    lines = []
    for entry in read_entries(path):
        count = len(set(parse_ranges(entry["passed"])))
        lines.append(
            f"{count} of {CELLS} cells passed with torch {entry['torch']} until {entry['date']}: "
            f"{entry['passed'] or 'none'}; failed: {entry['failed'] or 'none'}"
        )
    return "\n".join(lines) or "no cell of this version of draw.py is recorded"


def render(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as "0-4, 7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def parse_ranges(text: object) -> Iterator[int]:
    """Yield the numbers of ranges as `render` writes them."""
    for piece in filter(None, str(text).split(", ")):
        first, _, last = piece.partition("-")
        yield from range(int(first), int(last or first) + 1)
