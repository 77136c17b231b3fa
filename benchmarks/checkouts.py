"""CPU seconds of optimizer steps in two checkouts, such as before and after a change.

Both train the same recipe at the same time, and take turns: a slice of steps in one, then the same
steps in the other, so that both see the load of a shared machine. A pair is two such slices.
A process is some per cent faster or slower for all of its life, by where its memory lies:
`--starts 20` starts both processes 20 times, each time in the other order, and computes the
interval from the mean of each start.

    git worktree add /tmp/before COMMIT
    python benchmarks/checkouts.py /tmp/before . --recipe moe_debug --set data.packing=documents
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import results

WARM_UP = 10
"""steps before the first slice"""
SETTINGS = ("checkpoint.interval=0", "evaluate.interval=0", "schedule.name=constant")
# Steps wait where they report to the heartbeat, which all checkouts have.
CHILD = """
import os, sys, time
from trainer.cli.main import main
from trainer.engine.core.heartbeat import heartbeat
report, wait = os.fdopen(int(sys.argv[1]), "w"), os.fdopen(int(sys.argv[2]))
warm_up, steps, begin = int(sys.argv[3]), int(sys.argv[4]), heartbeat.begin_step
def begin_step(step):
    if step > warm_up and (step - warm_up - 1) % steps == 0:
        print(time.process_time(), file=report, flush=True)
        if not wait.readline():
            os._exit(0)
    begin(step)
type(heartbeat).begin_step = lambda self, step: begin_step(step)
main(["run", *sys.argv[5:]])
"""


class Checkout:
    """A run of a recipe that trains a slice of steps at a time.

    Args:
        tree: the checkout.
        options: of the command line.
        folder: gets the run directory.
    """

    def __init__(self, tree: Path, options: argparse.Namespace, folder: Path) -> None:
        read_report, report = os.pipe()
        wait, go = os.pipe()
        recipe = tree.resolve() / "recipes" / f"{options.recipe}.toml"
        total = WARM_UP + options.steps * (options.pairs + 2)
        words = [f"run.dir={folder}", f"run.steps={total}", *SETTINGS, *options.settings]
        sets = [word for each in words for word in ("--set", each)]
        head = [sys.executable, "-P", "-c", CHILD, str(report), str(wait), str(WARM_UP)]
        self._process = subprocess.Popen(
            [*head, str(options.steps), str(recipe), *sets],
            env={
                **os.environ,
                "PYTHONPATH": str(tree.resolve() / ".dev"),
                "OMP_NUM_THREADS": "1",
            },
            pass_fds=(report, wait),
            stdout=subprocess.DEVNULL,
        )
        os.close(report)
        os.close(wait)
        self._reports, self._go = os.fdopen(read_report), os.fdopen(go, "w")
        self._seconds = self._read()

    def run_slice(self) -> float:
        """Return the CPU seconds of the next slice."""
        print("go", file=self._go, flush=True)
        before, self._seconds = self._seconds, self._read()
        return self._seconds - before

    def _read(self) -> float:
        line = self._reports.readline()
        if not line:
            sys.exit("a run ended too early")
        return float(line)

    def close(self) -> None:
        """End the run."""
        self._go.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--recipe", default="llama3_debug")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--steps", type=int, default=12, help="steps of a slice")
    parser.add_argument("--pairs", type=int, default=30, help="of each start")
    parser.add_argument("--starts", type=int, default=1, help="times that both processes start")
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    trees = {"before": options.before, "after": options.after}
    commits = {name: describe_commit(tree) for name, tree in trees.items()}
    if options.starts > 1:
        starts = [measure(trees, options, start) for start in range(options.starts)]
        logs = [statistics.mean(start) for start in starts]
    else:
        logs = measure(trees, options, 0)
    mean = statistics.mean(logs)
    # The 97.5 % quantile of Student's t distribution, approximated from the quantile of the normal
    # distribution (Abramowitz and Stegun 1964, 26.7.5).
    z, free = statistics.NormalDist().inv_cdf(0.975), len(logs) - 1
    quantile = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    margin = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    ratio, low, high = (math.exp(each) for each in (mean, mean - margin, mean + margin))
    print(", ".join(f"{name} {commit}" for name, commit in commits.items()))
    print(f"{options.recipe}: after / before {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}")
    if options.write:
        names = {"commits": commits, "recipe": options.recipe, "settings": options.settings}
        names |= {"pairs": options.pairs, "starts": options.starts}
        content = {**names, "ratio": ratio, "interval": [low, high]}
        print(f"written to {results.append('checkouts', content).name}")


def measure(trees: dict[str, Path], options: argparse.Namespace, start: int) -> list[float]:
    """Start both checkouts, and return the logarithm of the ratio of each pair of slices."""
    order = list(trees.items())[:: -1 if start % 2 else 1]
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: Checkout(tree, options, Path(folder) / name) for name, tree in order}
        for run in runs.values():
            run.run_slice()
        logs = [compare(runs, number) for number in range(options.pairs)]
        for run in runs.values():
            run.close()
    return logs


def describe_commit(tree: Path) -> str:
    """Return the commit of a checkout, which ends in "-dirty" if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(
        command, cwd=tree, check=True, capture_output=True, text=True
    ).stdout.strip()


def compare(runs: dict[str, Checkout], number: int) -> float:
    """Return the logarithm of the ratio of a pair of slices; pairs begin with either in turns."""
    names = ["before", "after"] if number % 2 else ["after", "before"]
    seconds = {name: runs[name].run_slice() for name in names}
    return math.log(seconds["after"] / seconds["before"])


if __name__ == "__main__":
    main()
