"""Our kernels on a GPU beside torch's, in one run with the bounds of that machine.

Bounds are measured first: a large dense product, and a copy. Products are reported as a share of
the dense product of the same sizes, and operations on rows as a share of the copy.

    python benchmarks/kernels.py --suite quick --write

    python benchmarks/kernels.py --dry      # on a CPU, tiny: it runs, and its times say nothing
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import results
import torch
from kernel_cases import grouped, mixtures, rows
from kernel_cases.case import Case
from kernel_cases.timing import Timer

CACHE_BYTES = 60e6
MOST_SETS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("quick", "full"), default="quick")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--only", default="", help="operations with this in their name")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny inputs")
    parser.add_argument("--out", type=Path, help="append each row as a line of JSON")
    parser.add_argument("--write", action="store_true", help="append to results/kernels.jsonl")
    options = parser.parse_args()
    device, suite = ("cpu", "dry") if options.dry else ("cuda", options.suite)
    timer = Timer(device, 2 if options.dry else options.repeats)
    name = "dry run" if options.dry else torch.cuda.get_device_name()
    bounds = measure_bounds(timer)
    found = []
    for row in [bounds, *measure(suite, timer, bounds, options.only)]:
        row = {"device": name, **row}
        if options.write and not options.dry:
            results.append("kernels", row)
        if options.out:
            with options.out.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
        found.append(row)
    print(table(found))


def measure_bounds(timer: Timer) -> dict[str, Any]:
    """Return what this machine multiplies and copies at best, in TFLOP/s and GB/s."""
    is_dry = timer.device == "cpu"
    side, length = (64, 2**10) if is_dry else (8192, 2**30)
    a, b = (torch.randn(side, side, device=timer.device).bfloat16() for _ in range(2))
    one = torch.ones((), device=timer.device)
    fp8 = [each.to(torch.float8_e4m3fn) for each in (a, b)]
    source = torch.randint(0, 256, (length,), dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    product = timer(torch.matmul, [(a, b)]).median
    try:
        fp8_product = timer(_multiply_fp8, [(fp8[0], fp8[1].T, one)]).median
    except RuntimeError:  # no tensor cores for it
        fp8_product = math.inf
    copy = timer(lambda: target.copy_(source), [()]).median
    return {
        "operation": "bounds",
        "dense_tflops": 2 * side**3 / product / 1e9,
        "dense_fp8_tflops": 2 * side**3 / fp8_product / 1e9,
        "copy_gbytes": 2 * length / copy / 1e6,
    }


def _multiply_fp8(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def measure(
    suite: str, timer: Timer, bounds: dict[str, Any], only: str
) -> Iterator[dict[str, Any]]:
    """Yield a row for each baseline of each case."""
    for kind in (grouped, mixtures, rows):
        for case in kind.cases(suite, timer.device):
            if only in case.operation:
                yield from measure_case(case, timer, bounds)


def measure_case(case: Case, timer: Timer, bounds: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each baseline; one that cannot run says why."""
    first = case.inputs(0)
    size = sum(each.nbytes for each in first if isinstance(each, torch.Tensor))
    # Together more than the cache holds four times, so that no call finds its inputs there.
    count = min(MOST_SETS, max(2, math.ceil(4 * CACHE_BYTES / size)))
    sets = [first, *(case.inputs(seed) for seed in range(1, count))]
    about = {
        "operation": case.operation,
        "shape": case.shape,
        "routing": case.routing,
        "sizes": case.sizes,
    }
    bound = bounds[case.bound]
    for name, function in case.baselines.items():
        row = {**about, "baseline": name}
        try:
            row["relative_error"] = case.error(name, function(*first), first)
            times = timer(function, sets)
        except Exception as fault:  # the others are still worth knowing
            yield {**row, "failed": f"{type(fault).__name__}: {str(fault)[:200]}"}
            continue
        row |= {"milliseconds": times.median, "low": times.low, "high": times.high}
        row["replayed"] = times.replayed
        if case.flops:
            row["tflops"] = case.flops / times.median / 1e9
            bound = row["tflops"] if name == "dense" else bound
            row["of_bound"] = row["tflops"] / bound if bound else None
        else:
            row["gbytes"] = case.bytes / times.median / 1e6
            row["of_bound"] = row["gbytes"] / bounds["copy_gbytes"]
        yield row


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    bounds, *others = found
    heads = ["operation", "shape", "routing", "baseline", "ms", "rate", "of bound", "error"]
    lines = []
    for row in others:
        place = [row[key] for key in ("operation", "shape", "routing", "baseline")]
        if "failed" in row:
            lines.append([*place, "-", "-", "-", row["failed"][:40]])
            continue
        rate = f"{row['tflops']:.1f} TF/s" if "tflops" in row else f"{row['gbytes']:.0f} GB/s"
        share = "-" if row["of_bound"] is None else f"{row['of_bound']:.0%}"
        error = f"{row['relative_error']:.1e}"
        lines.append([*place, f"{row['milliseconds']:.3f}", rate, share, error])
    dense = f"dense {bounds['dense_tflops']:.1f} TFLOP/s, in fp8 {bounds['dense_fp8_tflops']:.1f}"
    return f"{dense}, copy {bounds['copy_gbytes']:.0f} GB/s\n{results.table(heads, lines)}"


if __name__ == "__main__":
    main()
