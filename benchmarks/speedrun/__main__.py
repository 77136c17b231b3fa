"""A race of optimizers on a CPU: the fewest steps to a validation loss. See docs/speedrun.md.

python benchmarks/speedrun race adamw --write
python benchmarks/speedrun tune adamw muon
python benchmarks/speedrun table --write
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(1, str(Path(__file__).parents[1]))


def main() -> None:
    import table
    from measure import rows
    from race import race
    from tune import store, tune

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["race", "tune", "table"])
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(rows())}")
    parser.add_argument("--write", action="store_true", help="to the results, and to the page")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(rows()):
        parser.error(f"there is no recipes/speedrun/{min(unknown)}.toml")
    for row in options.rows:
        if options.what == "tune":
            tune(row)
            store(row)
        elif options.what == "race":
            runs = []
            for run in race(row, is_written=options.write):
                words = f"{run['steps'] or '-'} of {run['length']} steps, loss {run['loss']:.3f}"
                print(f"{row}, seed {run['seed']}: {words}", flush=True)
                runs.append(run)
            mean, low, high = table.interval(table.steps_of(runs))
            print(f"{row}: {mean:.1f} steps ({low:.1f} to {high:.1f})", flush=True)
    if options.write:
        table.write()
    if options.what == "table":
        print(table.markdown())


if __name__ == "__main__":
    main()
