"""Tokens a second, MFU and peak memory of training steps on one GPU, beside what was estimated.

Each row is a run of the trainer in a process of its own, on synthetic documents of about 1,500
tokens; `plan` and `estimate-memory` say beforehand what to expect of a GPU of that name.

    python benchmarks/gpu_step.py --write
    python benchmarks/gpu_step.py --only moe
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import results
import torch

BASES = Path(__file__).parent.parent / "recipes" / "base"
RECIPE = """
extends = ["{base}"]
[run]
dir = "{folder}"
[data]
packing = "documents"
micro_batch = 4
seq_len = 4096
global_batch = 8
[[data.sources]]
name = "synthetic"
num_documents = 20000
document_tokens = 1500
[schedule]
warmup_steps = 4
[checkpoint]
interval = 1000000
last = "weights"
[evaluate]
interval = 0
[metrics]
interval = 1
[resilience]
non_finite = "skip"
[compile]
enabled = true
"""
DENSE = ("llama3.toml", ["model.flavor=1b", "model.vocab_size=128256"])
DEEP = (
    "llama3.toml",
    [
        "model.flavor=8b",
        "model.vocab_size=128256",
        "model.n_layers=8",
        "data.seq_len=8192",
        "data.micro_batch=2",
        "data.global_batch=4",
        "memory.recompute=selective",
    ],
)
MIXTURE = (
    "qwen3_moe.toml",
    ["model.flavor=moe_1b", "model.vocab_size=151936", "model.n_layers=8"],
)
FLOAT8 = "precision.float8.enabled=true"
CASES: dict[str, tuple[tuple[str, list[str]], list[str]]] = {
    "moe 1b, 8 of 16 blocks": (MIXTURE, []),
    "moe 1b, fused": (MIXTURE, ["kernels.moe=fused"]),
    "moe 1b, Triton's products": (MIXTURE, ["kernels.grouped_gemm=triton"]),
    "llama 1b": (DENSE, []),
    "llama 8b, 8 of 32 blocks": (DEEP, []),
    "llama 1b, float8": (DENSE, [FLOAT8]),
    "moe 1b, Triton's permutation": (MIXTURE, ["kernels.permute=triton"]),
    "llama 1b, eager": (DENSE, ["compile.enabled=false", "data.micro_batch=2"]),
    "moe 1b, eager": (MIXTURE, ["compile.enabled=false"]),
    "llama 1b, whole rows": (DENSE, ["data.packing=concat"]),
    "llama 8b, 8 of 32 blocks, float8": (DEEP, [FLOAT8]),
    "moe 1b, float8 experts": (MIXTURE, [FLOAT8]),
}
UNMEASURED = 4
"""first steps, which compile"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a case may take")
    parser.add_argument("--write", action="store_true", help="append to results/gpu_step.jsonl")
    options = parser.parse_args()
    name = torch.cuda.get_device_name()
    gpu = "h200" if "H200" in name else "h100"
    names = [each for each in CASES if options.only in each]
    rows = []
    with tempfile.TemporaryDirectory() as text, ThreadPoolExecutor(1) as pool:
        folder = Path(text)
        files = {each: write_recipe(each, folder, options.steps) for each in names}
        expected = [pool.submit(estimate, *files[each], gpu) for each in names]
        for each, future in zip(names, expected, strict=True):
            rows.append({"name": each, **measure(*files[each], folder, options.timeout)})
            rows[-1] |= future.result()
            print(json.dumps(rows[-1]), flush=True)
    if options.write:
        results.append("gpu_step", {"device": name, "steps": options.steps, "cases": rows})
    print(name)
    print(table(rows))


def write_recipe(name: str, folder: Path, steps: int) -> tuple[Path, list[str]]:
    """Write the recipe of a case; return its file and the settings beside it."""
    (base, model), changes = CASES[name]
    file = folder / f"{name.replace(' ', '_').replace(',', '').replace(chr(39), '')}.toml"
    file.write_text(RECIPE.format(base=BASES / base, folder=folder / "runs"))
    return file, [f"run.steps={steps}", *model, *changes]


def trainer(command: str, file: Path, settings: list[str], *others: str) -> list[str]:
    """Return the command line of the trainer."""
    words = [f"--set={each}" for each in settings]
    return [sys.executable, "-P", "-m", "trainer", command, str(file), *words, *others]


def measure(file: Path, settings: list[str], folder: Path, timeout: int) -> dict[str, Any]:
    """Train, and return medians of the steps after the first, or how the run failed."""
    command = trainer("run", file, [*settings, "run.resume=never"])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {timeout} s"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-3:]}
    metrics = (folder / "runs" / file.stem / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, metrics) if row["kind"] == "train"]
    return {
        "first_step_seconds": steps[0]["step_seconds"],
        **{
            key: statistics.median(row[key] for row in steps[UNMEASURED:])
            for key in ("step_seconds", "tokens_per_second", "mfu")
        },
        "memory_gib": max(row["memory_bytes"] for row in steps) / 2**30,
        "loss": steps[-1]["loss"],
    }


def estimate(file: Path, settings: list[str], gpu: str) -> dict[str, Any]:
    """Return the speed and the memory that were to be expected, as on a GPU in bf16."""
    settings = [*settings, "precision.compute=bf16"]
    found = {}
    for key, command in (
        ("plan", trainer("plan", file, settings, "--world=1", f"--gpu={gpu}", "--json")),
        ("memory", trainer("estimate-memory", file, settings, "--world=1", "--json")),
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"not_estimated": done.stderr.strip().splitlines()[-3:]}
        found[key] = json.loads(done.stdout)
    return {
        "planned_tokens_per_second": found["plan"]["tokens_per_second"],
        "estimated_gib": found["memory"]["ranks"][0]["peak_bytes"] / 2**30,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text."""
    heads = ["case", "step ms", "tokens/s", "of plan's", "MFU", "GiB", "of estimate", "first s"]
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append([row["name"], *["-"] * 6, str(row["failed"])[:80]])
            continue
        planned, expected = (
            row.get("planned_tokens_per_second"),
            row.get("estimated_gib"),
        )
        lines.append(
            [
                row["name"],
                f"{1000 * row['step_seconds']:.0f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / planned:.2f}" if planned else "-",
                f"{row['mfu']:.1%}" if row["mfu"] else "-",
                f"{row['memory_gib']:.1f}",
                f"{row['memory_gib'] / expected:.2f}" if expected else "-",
                f"{row['first_step_seconds']:.1f}",
            ]
        )
    return results.table(heads, lines)


if __name__ == "__main__":
    main()
