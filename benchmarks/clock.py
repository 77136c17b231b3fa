"""Published throughputs, for the clock of `trainer plan`: fitted on one half, tested on the other.

`published.csv` has a row for each published figure, with its source and what the source leaves
open. A row whose name has an even SHA-256 is one to fit, the others test; no constant was chosen by
looking at these.

    python benchmarks/clock.py          # report the errors of the constants in devices.py
    python benchmarks/clock.py --fit    # fit them anew, and report
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import results

from trainer.engine.estimate.devices import CLOCK, DEVICES, Clock, Device
from trainer.engine.estimate.roofline import measure
from trainer.engine.estimate.step_sizes import StepSizes
from trainer.engine.estimate.work import StepWork
from trainer.engine.recipe.load import load_recipe

PUBLISHED = Path(__file__).with_name("published.csv")
MOST_ERROR, LEAST_CORRELATION = 0.20, 0.95
BLACKWELL: dict[str, Device] = {
    # NVIDIA DGX B300, GB200 NVL72 and GB300 NVL72 data sheets: dense bf16, memory, NVLink in one
    # direction, and network cards of 800, 400 and 800 Gb/s for each GPU.
    "b300": Device(2250e12, 8e12, 900e9, 100e9),
    "gb200": Device(2500e12, 8e12, 900e9, 50e9),
    "gb300": Device(2500e12, 8e12, 900e9, 100e9),
}
PRIOR = Clock(
    product_share=0.75,
    half_size=100.0,
    attention_share=0.5,
    eager_traffic=8.0,
    compiled_traffic=4.0,
    eager_launch=3e-3,
    compiled_launch=3e-4,
    node_share=0.7,
    network_share=0.7,
    node_latency=5e-6,
    network_latency=2e-5,
    exposed=0.1,
    async_exposed=0.5,
)
"""where the fit begins, and what it is drawn to where rows say nothing"""
LARGEST = {"product_share": 0.9, "attention_share": 0.75, "node_share": 0.9, "network_share": 0.9}
PULL = 0.01
STEPS = (1.3, 1.1, 1.03, 1.01)


@dataclass(frozen=True)
class Row:
    """A published figure beside the work that the formulas find."""

    name: str
    work: StepWork
    device: Device
    tokens: float
    published: float
    is_test: bool

    def predict(self, clock: Clock) -> float:
        """Return tokens per second of one GPU."""
        return self.tokens / sum(self.work.seconds(self.device, clock))

    def log_error(self, clock: Clock) -> float:
        return math.log(self.predict(clock) / self.published)


def read_rows(folder: Path) -> list[Row]:
    with PUBLISHED.open() as file:
        rows = [values for values in csv.DictReader(file) if values["tokens_per_second"]]
    return [read_row(values, folder) for values in rows]


def recipe_text(values: dict[str, str]) -> str:
    """Return the recipe of a published run."""
    keys = ("shard", "context", "tensor", "pipeline", "expert")
    degrees = "".join(f"{key} = {values[key]}\n" for key in keys)
    virtual = int(values["stages_per_rank"])
    schedule = "Interleaved1F1B" if virtual > 1 else "1F1B"
    return (
        f'[run]\nsteps = 100\n[model]\nname = "{values["model"]}"\nflavor = "{values["flavor"]}"\n'
        f"[data]\nseq_len = {values['seq_len']}\nglobal_batch = {values['global_batch']}\n"
        f'micro_batch = {values["micro_batch"]}\n[[data.sources]]\nname = "synthetic"\n'
        f'[parallel]\n{degrees}[parallel.pipelining]\nschedule = "{schedule}"\n'
        f'stages_per_rank = {virtual}\n[memory]\nrecompute = "{values["recompute"]}"\n'
    )


def read_row(values: dict[str, str], folder: Path) -> Row:
    """Return a row of the table with the work of its plan."""
    file = folder / "recipe.toml"
    file.write_text(recipe_text(values))
    ranks = int(values["gpus"])
    settings = [each for each in values["settings"].split(";") if each]
    # The plan is what was run: it need not be one that this trainer can compile.
    is_async = "parallel.async_tensor=true" in settings
    recipe = load_recipe(file, [each for each in settings if "async" not in each], ranks).recipe
    compiled = recipe.compile.model_copy(update={"enabled": values["compiled"] == "1"})
    parallel = recipe.parallel.model_copy(update={"async_tensor": is_async})
    recipe = recipe.model_copy(update={"compile": compiled, "parallel": parallel})
    device = {**DEVICES, **BLACKWELL}[values["gpu"]]
    degrees = recipe.parallel.degrees.resolve(ranks)
    sizes = StepSizes.of(recipe)
    work, _ = measure(recipe, degrees, sizes, device, int(values["gpus_per_node"]))
    tokens = recipe.data.global_batch * recipe.data.seq_len / ranks
    published = float(values["tokens_per_second"])
    return Row(values["name"], work, device, tokens, published, is_test(values["name"]))


def is_test(name: str) -> bool:
    """Return whether a row belongs to the half that is never fitted."""
    return bool(hashlib.sha256(name.encode()).digest()[-1] % 2)


def fit(rows: Sequence[Row]) -> Clock:
    """Return the constants with the least absolute error of logarithms, by coordinate descent.

    Each source weighs as much as any other, however many rows it has.
    """
    sources = Counter(row.name.partition(" ")[0] for row in rows)
    weights = [1 / sources[row.name.partition(" ")[0]] / len(sources) for row in rows]
    names = [field.name for field in fields(Clock)]

    def loss(clock: Clock) -> float:
        errors = (abs(row.log_error(clock)) for row in rows)
        error = sum(weight * each for weight, each in zip(weights, errors, strict=True))
        pairs = zip(astuple(clock), astuple(PRIOR), strict=True)
        return error + PULL * sum(math.log(value / prior) ** 2 for value, prior in pairs)

    best, least = PRIOR, loss(PRIOR)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name, factor in product(names, (step, 1 / step)):
                value = min(getattr(best, name) * factor, LARGEST.get(name, math.inf))
                other = Clock(**{**vars(best), name: value})
                if (found := loss(other)) < least - 1e-7:
                    best, least, improved = other, found, True
    return best


def ranks_of(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(number) for number in range(len(values))]


def rank_correlation(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return Spearman's rank correlation."""
    pairs = zip(ranks_of(ones), ranks_of(others), strict=True)
    count = len(ones)
    return 1 - 6 * sum((a - b) ** 2 for a, b in pairs) / (count * (count**2 - 1))


def summarise(rows: Sequence[Row], clock: Clock) -> dict[str, Any]:
    errors = [abs(row.predict(clock) / row.published - 1) for row in rows]
    predicted = [row.predict(clock) for row in rows]
    return {
        "rows": len(rows),
        "median_error": round(median(errors), 3),
        "largest_error": round(max(errors), 3),
        "rank_correlation": round(rank_correlation(predicted, [r.published for r in rows]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="fit the constants before the report")
    parser.add_argument("--half", choices=("fitted", "test"), help="report one half alone")
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = read_rows(Path(folder))
    clock = fit([row for row in rows if not row.is_test]) if options.fit else CLOCK
    content: dict[str, Any] = {"clock": {k: float(f"{v:.3g}") for k, v in vars(clock).items()}}
    for half in (False, True):
        if options.half and half != (options.half == "test"):
            continue
        chosen = [row for row in rows if row.is_test == half]
        lines = [
            [row.name, f"{row.published:,.0f}", f"{row.predict(clock):,.0f}",
             f"{row.predict(clock) / row.published:.2f}"]
            for row in chosen
        ]  # fmt: skip
        heads = ["test half" if half else "fitted half", "published", "estimate", "ratio"]
        print(results.table(heads, lines), "\n")
        content["test" if half else "fitted"] = summarise(chosen, clock)
    content["goal"] = {"median_error": MOST_ERROR, "rank_correlation": LEAST_CORRELATION}
    print(json.dumps(content, indent=1))
    if options.write:
        print(f"written to {results.append('clock', content).name}")


if __name__ == "__main__":
    main()
