"""Times the step of muon beside that of adamw, and beside the batched products of muon alone.

The weights are those of two blocks of a Llama of width 512, in fp32. The three run in turns, and
of each the least CPU time counts, which other processes disturb less than the time that passes.
The exit code is 1 if muon's step takes longer than adamw's by more than 1.2 times the products.

    python benchmarks/muon.py --write
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import results
import torch

from trainer.engine.optim.matrix.orthogonalize import orthogonalize
from trainer.engine.optim.matrix.tables import Muon
from trainer.engine.optim.optimizers import AdamW
from trainer.engine.optim.parameters import parameter_groups, undecorated_step
from trainer.engine.optim.placement import ParameterPlacement
from trainer.engine.optim.tables import OptimizerConfig

MOST_OVERHEAD = 1.2
WIDTH, FFN, LAYERS = 512, 1536, 2
SHAPES = {"q": (WIDTH, WIDTH), "o": (WIDTH, WIDTH), "up": (FFN, WIDTH), "gate": (FFN, WIDTH)}
SHAPES |= {"k": (WIDTH // 4, WIDTH), "v": (WIDTH // 4, WIDTH), "down": (WIDTH, FFN)}
WEIGHTS = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in SHAPES.items()}


def step_of(config: OptimizerConfig) -> Callable[[], None]:
    """Return a function that steps an optimizer over the weights."""
    weights = [(name, torch.nn.Parameter(torch.randn(shape))) for name, shape in WEIGHTS.items()]
    for _, weight in weights:
        weight.grad = torch.randn_like(weight)
    placements = {name: ParameterPlacement(name, shape) for name, shape in WEIGHTS.items()}
    groups = parameter_groups(weights, config, placements=placements)
    return undecorated_step(config.build(groups, torch.device("cpu")))


def products() -> Callable[[], None]:
    """Return a function that orthogonalizes batches of the weights' shapes."""
    counts = dict.fromkeys(WEIGHTS.values(), 0)
    for shape in WEIGHTS.values():
        counts[shape] += 1
    batches = [torch.randn(count, *shape) for shape, count in counts.items()]

    def compute() -> None:
        for batch in batches:
            orthogonalize(batch, 5)

    return compute


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args()
    timed = {"muon": step_of(Muon()), "adamw": step_of(AdamW()), "products": products()}
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(options.repeats):
        for name, run in timed.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    overhead = (best["muon"] - best["adamw"]) / best["products"]
    rows = [[name, f"{1000 * seconds:.2f}"] for name, seconds in best.items()]
    print(results.table(["", "milliseconds"], rows))
    print(f"muon takes longer than adamw by {overhead:.3f} times the products")
    if options.write:
        seconds = {f"{name}_seconds": value for name, value in best.items()}
        results.append("muon", {"width": WIDTH, **seconds, "overhead": overhead})
    return int(overhead > MOST_OVERHEAD)


if __name__ == "__main__":
    raise SystemExit(main())
