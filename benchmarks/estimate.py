"""What memory estimates cost: CPU seconds, and the memory of the largest process.

python benchmarks/estimate.py --write
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results

GIB = 2**30
ALLOWED_CPU_SECONDS, ALLOWED_GIB = 60, 8
TRAINER = (sys.executable, "-P", "-m", "trainer")
PR_SET_CHILD_SUBREAPER = 36
RECIPE = """
[run]
steps = 100
[model]
name = "llama3"
flavor = "{flavor}"
[data]
seq_len = 8192
global_batch = {batch}
micro_batch = {micro}
[[data.sources]]
name = "synthetic"
[parallel]
{parallel}
[memory]
recompute = "full"
"""
COSTS: dict[str, tuple[int, dict[str, Any]]] = {
    "405B on 1,024, 8 micro batches": (
        1024,
        {"flavor": "405b", "batch": 128, "micro": 1, "parallel": "pipeline = 8\ntensor = 8"},
    ),
    "405B on 1,024, 16 micro batches": (
        1024,
        {"flavor": "405b", "batch": 256, "micro": 1, "parallel": "pipeline = 8\ntensor = 8"},
    ),
    "70B on 256": (256, {"flavor": "70b", "batch": 512, "micro": 16, "parallel": "tensor = 8"}),
    "8B on 8": (8, {"flavor": "8b", "batch": 16, "micro": 2, "parallel": ""}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        costs = [cost(Path(folder), name) for name in COSTS]
    print(show_costs(costs))
    if options.write:
        print(f"written to {results.append('estimate', {'costs': costs}).name}")


def recipe_file(folder: Path, values: dict[str, Any]) -> Path:
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(**values))
    return file


def cost(folder: Path, name: str) -> dict[str, Any]:
    """Run the command; its processes' CPU seconds are added up, grandchildren included."""
    world, values = COSTS[name]
    # Orphans, such as the process that others are forked from, become this process's children.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [*TRAINER, "estimate-memory", str(recipe_file(folder, values))]
    done = subprocess.run(
        [*command, "--world", str(world), "--json"], capture_output=True, text=True, check=True
    )
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ranks = json.loads(done.stdout)["ranks"]
    return {
        "name": name,
        "cpu_s": round(cpu, 1),
        "largest_process_gib": round(after.ru_maxrss * 1024 / GIB, 2),
        "peak_gib": round(max(each["peak_bytes"] for each in ranks) / GIB, 2),
    }


def show_costs(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        [
            each["name"],
            f"{each['cpu_s']:.1f}",
            str(ALLOWED_CPU_SECONDS),
            f"{each['largest_process_gib']:.2f}",
            str(ALLOWED_GIB),
            f"{each['peak_gib']:.2f}",
        ]
        for each in rows
    ]
    heads = ["", "CPU s", "goal", "largest process GiB", "goal", "peak GiB"]
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
