"""CPU seconds of a compiled run's second start, beside an eager start and the compiler's import.

The first start fills the cache of `compile.cache_dir`. Every repetition then runs each command
once, so that all see the same load; CPU seconds are those of a process and all that it waited for.
Goal: a second start takes at most an eager start, the import of torch's compiler and one second.

    python benchmarks/compiled_start.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import results

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "llama3_debug.toml"
ALLOWED_SECONDS = 1.0
IMPORTS = {
    "import torch": "import torch",
    "import torch and its compiler": "import torch, torch._dynamo, torch._inductor.compile_fx",
}
# Runs the command line and prints how torch's caches answered, from inside the process.
COUNTED = """
import json, os, sys
from trainer.cli import main
def end(code):
    found = {}
    if "torch._dynamo" in sys.modules:
        counters = sys.modules["torch._dynamo.utils"].counters
        found = {**counters["aot_autograd"], **counters["inductor"]}
    print(json.dumps(found), flush=True)
    os._exit(code)
main.end_process = end
main.main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start(folder, "eager")  # tokenises, and fills the disk cache
        first, _ = start(folder, "first", compiled=True)
        seconds: dict[str, list[float]] = {name: [] for name in (*IMPORTS, "eager", "second")}
        for repetition in range(options.repetitions):
            for name, code in IMPORTS.items():
                seconds[name].append(run([sys.executable, "-P", "-c", code])[0])
            seconds["eager"].append(start(folder, f"eager-{repetition}")[0])
            cpu, counters = start(folder, f"second-{repetition}", compiled=True)
            seconds["second"].append(cpu)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    compiler = medians["import torch and its compiler"] - medians["import torch"]
    allowed = medians["eager"] + compiler + ALLOWED_SECONDS
    rows = [
        ["eager start, two steps", f"{medians['eager']:.2f}"],
        ["import of torch's compiler", f"{compiler:.2f}"],
        ["first compiled start", f"{first:.2f}"],
        ["second compiled start", f"{medians['second']:.2f}"],
        ["allowed", f"{allowed:.2f}"],
    ]
    print(results.table(["", "CPU s"], rows))
    print("second start:", ", ".join(f"{name} {count}" for name, count in counters.items()))
    if options.write:
        content = {
            "repetitions": options.repetitions,
            "cpu_s": {row[0]: float(row[1]) for row in rows},
        }
        print(f"written to {results.append('compiled_start', content | {'cache': counters}).name}")


def start(folder: Path, name: str, *, compiled: bool = False) -> tuple[float, dict[str, int]]:
    """Run two steps of the debug recipe; return CPU seconds and the counters of torch's caches."""
    settings = {
        "run.dir": folder,
        "run.name": name,
        "run.steps": 2,
        "schedule.warmup_steps": 0,
        "evaluate.interval": 0,
        "data.cache_dir": folder / "tokens",
        "compile.enabled": str(compiled).lower(),
        "compile.cache_dir": folder / "compiled",
    }
    words = [f"--set={key}={value}" for key, value in settings.items()]
    seconds, output = run([sys.executable, "-P", "-c", COUNTED, "run", str(RECIPE), *words])
    return seconds, json.loads(output.splitlines()[-1])


def run(command: list[str]) -> tuple[float, str]:
    """Return the CPU seconds of a command and of its children, and what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, output


if __name__ == "__main__":
    main()
