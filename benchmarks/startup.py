"""Seconds from the command line to the first optimizer step, beside `import torch` alone.

Commands that need no torch stand beside `import pydantic, typer`: once as they are, and once with
200 more components, which an installed package offers. Every repetition runs each command once, so
that all see the same load. A step is done when its row stands in metrics.jsonl; CPU seconds are the
process's own up to then.

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
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import results

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "llama3_debug.toml"
BASELINE = "import torch"
LIGHT_BASELINE = "import pydantic, typer"
ALLOWED_RATIOS = {
    "trainer run, first step": 1.6,
    "trainer validate": 3,
    "trainer status": 2,
    "trainer report": 2,
}
"""of wall seconds to import torch; of CPU seconds to the other baseline"""
MORE_COMPONENTS = 200
COMPONENT = """from typing import Literal
from trainer.plugins import Count, OptimizerConfig
class Dummy(OptimizerConfig):
    name: Literal["dummy_{number}"] = "dummy_{number}"
    first: Count = 1
    second: float = 0.5
    third: list[str] = []
"""
TRAINER = (sys.executable, "-P", "-m", "trainer")


class Seconds(NamedTuple):
    wall: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measures = measures_in(folder)
        measured: dict[str, list[Seconds]] = {name: [] for name in measures}
        for repetition in range(options.repetitions + 1):
            for name, measure in measures.items():
                seconds = measure()
                if repetition:  # the first one tokenises, and fills the disk cache
                    measured[name].append(seconds)
    baselines = {name: BASELINE if "step" in name else LIGHT_BASELINE for name in measured}
    baselines[BASELINE] = BASELINE
    rows = [row(name, measured[name], measured[baselines[name]]) for name in measured]
    print(show(rows))
    if options.write:
        content = {"repetitions": options.repetitions, "commands": rows}
        print(f"written to {results.append('startup', content).name}")


def measures_in(folder: Path) -> dict[str, Callable[[], Seconds]]:
    """Return what is measured; a finished run, and a package of components, are made for it."""
    run = folder / "run"
    settings = [f"run.dir={folder}", "run.name=run", "run.steps=20", "evaluate.interval=0"]
    settings += [f"data.cache_dir={folder / 'cache'}"]
    until_exit([*TRAINER, "run", str(RECIPE), *(f"--set={each}" for each in settings)])
    site = folder / "site"
    package = site / "dummies-0.1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: dummies\nVersion: 0.1\n")
    entries = ["[trainer.optimizer]"]
    for number in range(MORE_COMPONENTS):
        (site / f"dummy_{number}.py").write_text(COMPONENT.format(number=number))
        entries.append(f"dummy_{number} = dummy_{number}:Dummy")
    (package / "entry_points.txt").write_text("\n".join(entries))
    imports = [sys.executable, "-P", "-c"]
    commands = {
        "--help": ["--help"],
        "validate": ["validate", str(RECIPE)],
        "status": ["status", str(run)],
        "report": ["report", str(run)],
        "list optimizer": ["list", "optimizer"],
    }
    measures: dict[str, Callable[[], Seconds]] = {
        BASELINE: partial(until_exit, [*imports, BASELINE]),
        "trainer run, first step": partial(first_step, folder),
        LIGHT_BASELINE: partial(until_exit, [*imports, LIGHT_BASELINE]),
    }
    for name, command in commands.items():
        name = f"trainer {name}"
        measures[name] = partial(until_exit, [*TRAINER, *command])
        more = f"{name}, {MORE_COMPONENTS} more components"
        measures[more] = partial(until_exit, [*TRAINER, *command], site)
    return measures


def until_exit(command: Sequence[str], site: Path | None = None) -> Seconds:
    """Return the time of a command; `site` is a folder of installed packages."""
    started = time.perf_counter()
    process = start(command, site)
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


def start(command: Sequence[str], site: Path | None = None) -> subprocess.Popen[bytes]:
    paths = [os.environ.get("PYTHONPATH", ""), str(site or "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
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
        allowed = ALLOWED_RATIOS.get(name.removesuffix(f", {MORE_COMPONENTS} more components"))
        numbers = [f"{each[key]:.2f}" for key in ("wall_s", "cpu_s", "wall_ratio", "cpu_ratio")]
        lines.append([name, *numbers, f"x {allowed}" if allowed else ""])
    heads = ["", "wall s", "CPU s", "wall ratio", "CPU ratio", "goal"]
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
