"""Seconds from the command line to the first optimizer step, beside `import torch` alone.

Every repetition runs each command once, so that all see the same load. A step is done when its row
stands in metrics.jsonl; CPU seconds are the process's own up to then.

    python benchmarks/startup.py --write
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import results

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "llama3_debug.toml"
BASELINE = "import torch"
ALLOWED_RATIO = 1.6
ALLOWED_SECONDS = {"trainer --help": 0.25, "trainer validate": 0.4}
TRAINER = (sys.executable, "-P", "-m", "trainer")


class Seconds(NamedTuple):
    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    measures: dict[str, Callable[[Path], Seconds]] = {
        BASELINE: lambda _: until_exit([sys.executable, "-P", "-c", "import torch"]),
        "trainer run, first step": first_step,
        "trainer --help": lambda _: until_exit([*TRAINER, "--help"]),
        "trainer validate": lambda _: until_exit([*TRAINER, "validate", str(RECIPE)]),
    }
    measured: dict[str, list[Seconds]] = {name: [] for name in measures}
    with tempfile.TemporaryDirectory() as folder:
        for repetition in range(options.repetitions + 1):
            for name, measure in measures.items():
                seconds = measure(Path(folder))
                if repetition:  # the first one tokenises, and fills the disk cache
                    measured[name].append(seconds)
    rows = [row(name, seconds, measured[BASELINE]) for name, seconds in measured.items()]
    print(show(rows))
    if options.write:
        content = {"repetitions": options.repetitions, "commands": rows}
        print(f"written to {results.append('startup', content).name}")


def until_exit(command: Sequence[str]) -> Seconds:
    started = time.perf_counter()
    process = start(command)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Seconds(wall, usage.ru_utime + usage.ru_stime)


def first_step(folder: Path) -> Seconds:
    """Run the debug recipe until the row of step 1 is there."""
    name = f"run-{time.monotonic_ns()}"
    metrics = folder / name / "metrics.jsonl"
    settings = {
        "run.dir": folder,
        "run.name": name,
        "data.cache_dir": folder / "cache",
    }
    command = [*TRAINER, "run", str(RECIPE)]
    command += [f"--set={key}={value}" for key, value in settings.items()]
    started = time.perf_counter()
    process = start(command)
    watched = psutil.Process(process.pid)
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        time.sleep(0.005)
    wall, used = time.perf_counter() - started, watched.cpu_times()
    process.kill()
    process.wait()
    return Seconds(wall, used.user + used.system)


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def row(name: str, seconds: list[Seconds], baseline: list[Seconds]) -> dict[str, object]:
    pairs = list(zip(seconds, baseline, strict=True))
    return {
        "name": name,
        "wall_s": round(statistics.median(each.wall for each in seconds), 3),
        "cpu_s": round(statistics.median(each.cpu for each in seconds), 3),
        "wall_ratio": round(statistics.median(a.wall / b.wall for a, b in pairs), 3),
        "cpu_ratio": round(statistics.median(a.cpu / b.cpu for a, b in pairs), 3),
    }


def show(rows: list[dict[str, object]]) -> str:
    lines = []
    for each in rows:
        name = str(each["name"])
        goal = f"{ALLOWED_SECONDS[name]} s" if name in ALLOWED_SECONDS else f"x {ALLOWED_RATIO}"
        numbers = [f"{each[key]:.2f}" for key in ("wall_s", "cpu_s", "wall_ratio", "cpu_ratio")]
        lines.append([name, *numbers, "" if name == BASELINE else goal])
    heads = ["", "wall s", "CPU s", "wall ratio", "CPU ratio", "goal"]
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
