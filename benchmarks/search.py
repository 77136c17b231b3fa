"""Plans that others chose, for the rows of `published.csv`, beside those that `--search` finds.

For each row: whether the plan is among those that the search believes to fit, and how much longer
its step takes than the fastest of them; the same for the fastest plan of the row's degrees,
whatever it recomputes. Both are by the formulas of the search, without simulations. What a search
does not vary (LoRA, what selective recomputation keeps, the schedule of a pipeline) is the row's
own. Rows of one source, model and number of GPUs are paired: does the search prefer the plan that
was faster?

    python benchmarks/search.py --most-gpus 32 --write
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import clock
import results

from trainer.engine.estimate.devices import DEVICES, GPU_MIB, MIB
from trainer.engine.estimate.roofline import Candidate, estimate
from trainer.engine.estimate.search import USABLE, variants
from trainer.engine.estimate.step_sizes import StepSizes
from trainer.engine.recipe.load import load_recipe

# torchtitan's H100s have 96 GB; the others are those of `GPU_MIB`.
MORE_MIB = {"torchtitan": 96 * 10**9 // MIB}

GROUP = ("source", "gpus", "model", "flavor", "seq_len")


def compare(values: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return how the plan of a row stands among those of a search."""
    file, ranks = folder / "recipe.toml", int(values["gpus"])
    file.write_text(clock.recipe_text(values))
    settings = [each for each in values["settings"].split(";") if each and "async" not in each]
    if values["name"].startswith(("KempnerForge", "Automodel")):
        settings.append("precision.parameters=bf16")  # as theirs are; it matters for what fits
    recipe = load_recipe(file, settings, ranks).recipe
    compiled = recipe.compile.model_copy(update={"enabled": values["compiled"] == "1"})
    sizes, device = StepSizes.of(recipe), DEVICES[values["gpu"]]
    per_node, degrees = int(values["gpus_per_node"]), recipe.parallel.degrees.resolve(ranks)

    def timed(variant: Any, chosen: Any) -> Candidate:
        # Not before: the search is of plans, and not all that were run compile here.
        variant = variant.model_copy(update={"compile": compiled})
        return estimate(variant, chosen, sizes, device, per_node)

    published = timed(recipe, degrees)
    usable = MORE_MIB.get(values["name"].partition(" ")[0], GPU_MIB[values["gpu"]]) * MIB * USABLE
    found = [timed(*each) for each in variants(recipe, ranks, per_node)]
    fitting = sorted(
        (one for one in found if one.memory_bytes <= usable), key=lambda one: one.seconds
    )
    alike = [one for one in fitting if one.degrees == degrees]
    # Where nothing fits, the fastest of all plans shows at least the times.
    best = fitting[0] if fitting else min(found, key=lambda one: one.seconds)
    tokens = recipe.data.global_batch * recipe.data.seq_len / ranks
    return {
        "name": values["name"],
        "plans": len(found),
        "fitting": len(fitting),
        "is_found": any(one.micro_batch == published.micro_batch for one in alike),
        "ratio": round(published.seconds / best.seconds, 3),
        "ratio_of_degrees": round(alike[0].seconds / best.seconds, 3) if alike else None,
        "tokens_per_second": round(tokens / published.seconds, 1),
        "published": float(values["tokens_per_second"]),
        "group": [values[key] for key in GROUP] + [each for each in settings if "model." in each],
        "published_gib": round(published.memory_bytes / 2**30, 1),
        "best": f"{describe(best)}, {best.recompute}, micro batch {best.micro_batch}",
    }


def describe(plan: Candidate) -> str:
    """Return the degrees above 1."""
    return ", ".join(f"{axis} {n}" for axis, n in plan.degrees.by_axis.items() if n > 1) or "one"


def summarise(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = [each["ratio"] for each in found]
    degrees = [each["ratio_of_degrees"] for each in found if each["ratio_of_degrees"]]
    pairs = [
        (one["published"] - other["published"])
        * (one["tokens_per_second"] - other["tokens_per_second"])
        for one, other in combinations(found, 2)
        if one["group"] == other["group"]
    ]
    return {
        "published": len(found),
        "found": sum(each["is_found"] for each in found),
        "median_ratio": round(median(ratios), 3),
        "largest_ratio": max(ratios),
        "median_ratio_of_degrees": round(median(degrees), 3),
        "pairs": len(pairs),
        "pairs_ordered_alike": sum(product > 0 for product in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most-gpus", type=int, default=64, help="leave out larger runs")
    parser.add_argument("--rows", nargs="*", help="parts of the names of rows; all without it")
    parser.add_argument("--write", action="store_true", help=f"append to {results.FOLDER.name}/")
    options = parser.parse_args()
    with clock.PUBLISHED.open() as file, tempfile.TemporaryDirectory() as folder:
        rows = [
            values
            for values in csv.DictReader(file)
            if values["gpu"] in GPU_MIB and values["tokens_per_second"]
        ]
        chosen = [
            values
            for values in rows
            if int(values["gpus"]) <= options.most_gpus
            and any(part in values["name"] for part in options.rows or [""])
        ]
        found = []
        for values in chosen:
            found.append(compare(values, Path(folder)))
            print(json.dumps(found[-1]), flush=True)
    content = {**summarise(found), "larger_rows_left_out": len(rows) - len(chosen), "rows": found}
    print(json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1))
    if options.write:
        print(f"written to {results.append('search', content).name}")


if __name__ == "__main__":
    main()
