"""What every benchmark writes down: one JSON object a line, with date and hardware."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def append(benchmark: str, measured: dict[str, Any]) -> Path:
    """Append one run of `benchmark` to its file, update the READMEs, and return the file."""
    file = FOLDER / f"{benchmark}.jsonl"
    FOLDER.mkdir(exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = {"date": date, "hardware": hardware(), "torch": version("torch"), **measured}
    with open(file, "a") as lines:
        lines.write(json.dumps(line) + "\n")
    update = [sys.executable, FOLDER.parent / "summary.py", "--write"]
    subprocess.run(update, check=True, stdout=subprocess.DEVNULL)
    return file


def hardware() -> dict[str, Any]:
    """Return the processor, its matrix extensions, the cores and the load at this moment."""
    found = {"processor": platform.processor() or platform.machine(), "extensions": []}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(
            (part.strip() for part in line.split(":", 1))
            for line in cpuinfo.read_text().splitlines()
            if ":" in line
        )
        wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
        found["processor"] = fields.get("model name", found["processor"])
        found["extensions"] = [name for name in wanted if name in fields.get("flags", "").split()]
    return {**found, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return aligned text: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        first, *others = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
