"""Draw, show and run cells: combinations of everything that a plan meets.

    python -m tests.cells run 17           this cell
    python -m tests.cells run 0 100        100 cells, from number 0
    python -m tests.cells show 17          its recipe

Cells that passed are recorded in `runs/`, in a file for each version of `draw.py`, and a second
`run` of several cells leaves them out; `--again` runs all. `--jobs 2` runs so many at a time.
"""

import argparse
import json
import sys
import time
from hashlib import sha256
from pathlib import Path

from tests.cells.draw import draw
from tests.cells.run import run_cells
from tests.distributed import ROOT

DIGEST = sha256(Path(__file__).with_name("draw.py").read_bytes()).hexdigest()[:12]
RECORD = ROOT / f"runs/cells-{DIGEST}.txt"


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "show"])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    words = parser.parse_args()
    if words.command == "show":
        print(draw(words.first).describe())
        print(json.dumps(draw(words.first).values, indent=1))
        return 0
    RECORD.parent.mkdir(exist_ok=True)
    record = None if words.again or words.count == 1 else RECORD
    started = time.monotonic()
    failures = run_cells(range(words.first, words.first + words.count), record, words.jobs)
    print(f"{len(failures)} failures, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
