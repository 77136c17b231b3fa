"""Draw, show and run cells: combinations of everything that a plan meets.

    python -m tests.cells                  which ones passed, by the committed record
    python -m tests.cells record           write the results of `run` into the record
    python -m tests.cells run 17           this cell
    python -m tests.cells run 0 100        100 cells, from number 0
    python -m tests.cells show 17          its recipe

Results are written to `runs/`, in a file for each version of `draw.py` and of torch, and a second
`run` of several cells leaves out those that passed; `--again` runs all. `--jobs 2` runs so many at
a time.
"""

import argparse
import json
import sys
import time
from datetime import date
from importlib.metadata import version

from tests.cells.draw import draw
from tests.cells.record import DIGEST, PASSED, add_results, describe
from tests.cells.run import read_results, run_cells
from tests.distributed import ROOT

TORCH = version("torch")
RESULTS = ROOT / f"runs/cells-{DIGEST}-{TORCH}.txt"


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", choices=["run", "show", "record"])
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    words = parser.parse_args()
    if words.command == "show":
        print(draw(words.first).describe())
        print(json.dumps(draw(words.first).values, indent=1))
        return 0
    if words.command != "run":
        if words.command == "record":
            add_results(PASSED, read_results(RESULTS), date.today(), TORCH)
        print(describe(PASSED))
        return 0
    RESULTS.parent.mkdir(exist_ok=True)
    results = None if words.again or words.count == 1 else RESULTS
    started = time.monotonic()
    failures = run_cells(range(words.first, words.first + words.count), results, words.jobs)
    print(f"{len(failures)} failures, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
