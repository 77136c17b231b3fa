"""CPU seconds and memory of a step of a mixture of many small experts in bf16, against fp32.

Both are runs of the trainer in processes of one thread that take turns step by step; see
`step_time.py`. The sizes are those of `moe.py --size many`.

    python benchmarks/moe_precision.py --write
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import results
import step_time
from step_time import Entry

RECIPE = {
    "model.name": "mixtral",
    "model.dim": 512,
    "model.n_layers": 4,
    "model.moe.num_experts": 32,
    "model.moe.experts_per_token": 4,
    "model.moe.expert_ffn_dim": 128,
    "data.global_batch": 4,
    "data.micro_batch": 4,
}
SETTINGS = tuple(f"--set={key}={value}" for key, value in RECIPE.items())
ENTRIES = {
    f"trainer {dtype}": Entry("ours.py", ("--compute", dtype, *SETTINGS), "trainer")
    for dtype in ("fp32", "bf16")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = step_time.measure(options.vocab, ENTRIES, {}, Path(folder), options)
    print(step_time.show(rows))
    if options.write:
        measured = {"rounds": options.rounds, "recipe": RECIPE, "baselines": rows}
        print(f"written to {results.append('moe_precision', measured).name}")


if __name__ == "__main__":
    main()
