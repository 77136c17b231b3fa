"""Measures federated training on one thread: losses beside data-parallel training, and its cost.

`ordering` trains a small Llama on the Python standard library as one worker, as data-parallel
training over 8 clients, by FedAvg and by DiLoCo with a round of 16 steps, with equal steps of each
client. `sparse` compares DiLoCo whose clients send the largest of 4,096 values with DiLoCo that
sends all, on a Llama of one layer that trains until its loss hardly falls
(`--steps 18000 --outer-lr 1.0`). `inner` compares Muon with AdamW as the clients' optimizer, each
at the best of 5 rates.
`overhead` tells how much of the time of 8 clients of 1 M parameters is not training.

    python benchmarks/federated.py ordering --write
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import results

CLIENTS, BATCH = 8, 4
ROOT = Path(__file__).resolve().parent.parent
RECIPE = f"""\
extends = ["{ROOT}/recipes/base/llama3.toml"]
[model]
flavor = "debug"
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 192
tie_embeddings = true
[tokenizer]
name = "bytes"
[data]
seq_len = 128
global_batch = {BATCH}
micro_batch = {CLIENTS * BATCH}
[[data.sources]]
name = "python"
[optimizer]
lr = 3e-3
[schedule]
name = "constant"
warmup_steps = 16
[precision]
compute = "fp32"
[checkpoint]
interval = 0
[evaluate]
steps = 64
"""
SMALL = {
    "model.dim": 32,
    "model.n_layers": 1,
    "model.ffn_dim": 96,
    "data.seq_len": 64,
    "data.global_batch": 2,
}
INNER_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
DILOCO = {"federation.server.name": "fednesterov", "federation.server.lr": 0.7}


def train(recipe: str, command: list[str], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train in a process of its own, and return the rows of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipe.toml")
        file.write_text(recipe)
        words = [f"--set={key}={value}" for key, value in settings.items()]
        line = [sys.executable, "-P", "-m", "trainer", *command, str(file), *words]
        line += ["--set=run.name=r", f"--set=run.dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        lines = Path(folder, "r", "metrics.jsonl").read_text().splitlines()
    return [json.loads(text) for text in lines]


def federated(rounds: int, local_steps: int, **more: Any) -> dict[str, Any]:
    """Return the settings of a federation."""
    counts = {"clients": CLIENTS, "rounds": rounds, "local_steps": local_steps}
    settings = {f"federation.{key}": value for key, value in counts.items()}
    return {**settings, "evaluate.interval": rounds * local_steps, **more}


def final_loss(rows: list[dict[str, Any]]) -> float:
    """Return the loss of the last evaluation."""
    return float([row["loss"] for row in rows if row["kind"] == "eval"][-1])


def measure_ordering(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the loss of each way to train, and whether they are in DiLoCo's order."""
    steps, local = options.steps, 16
    ordinary = {"run.steps": steps, "evaluate.interval": steps}
    outer = {
        **DILOCO,
        "federation.server.lr": options.outer_lr,
        "federation.server.momentum": options.momentum,
    }
    ways: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "data_parallel": lambda: train(
            RECIPE, ["run"], {**ordinary, "data.global_batch": CLIENTS * BATCH, **given}
        ),
        "diloco": lambda: train(
            RECIPE, ["federate", "run"], federated(steps // local, local, **outer, **given)
        ),
        "fedavg": lambda: train(
            RECIPE, ["federate", "run"], federated(steps // local, local, **given)
        ),
        "one_worker": lambda: train(RECIPE, ["run"], {**ordinary, **given}),
    }
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(options.seeds):
        given = {"run.seed": seed, "optimizer.lr": options.lr}
        for name, run in ways.items():
            losses[name].append(final_loss(run()))
            print(f"seed {seed} {name:15} {losses[name][-1]:.4f}", flush=True)
    means = [mean(each) for each in losses.values()]
    measured = {"steps": steps, "local_steps": local, "lr": options.lr, **losses}
    measured |= {"outer_lr": options.outer_lr, "momentum": options.momentum}
    return measured, means == sorted(means)


def measure_sparse(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the losses with and without compression, and how many bytes data parallel needs."""
    local, rounds = 30, options.steps // 30
    given = {**SMALL, "optimizer.lr": options.lr, "run.seed": options.seed}
    dense = train(RECIPE, ["federate", "run"], federated(rounds, local, **DILOCO, **given))
    print(f"diloco {final_loss(dense):.4f}", flush=True)
    compressed = {
        "federation.compression.name": "topk",
        "federation.compression.keep": options.keep,
        "federation.compression.error_decay": options.error_decay,
        "federation.server.lr": options.outer_lr,
    }
    sparse = train(RECIPE, ["federate", "run"], federated(rounds, local, **compressed, **given))
    print(f"sparse {final_loss(sparse):.4f}", flush=True)
    moved = [row for row in sparse if row["kind"] == "round"][1:]
    first = next(row for row in dense if row["kind"] == "round")
    # A ring all-reduce sends and receives 2 (C - 1) / C of the gradients in each step.
    gradients = first["bytes_sent"] / CLIENTS
    data_parallel = 4 * gradients * (CLIENTS - 1) / CLIENTS * local * CLIENTS
    moves = mean(row["bytes_sent"] + row["bytes_received"] for row in moved)
    measured = {
        "rounds": rounds,
        "local_steps": local,
        "lr": options.lr,
        "outer_lr": options.outer_lr,
        "keep": options.keep,
        "error_decay": options.error_decay,
        "seed": options.seed,
        "diloco": final_loss(dense),
        "sparse": final_loss(sparse),
        "times_fewer_bytes": data_parallel / moves,
    }
    is_near = measured["sparse"] <= 1.005 * measured["diloco"]
    return measured, is_near and measured["times_fewer_bytes"] >= 400


def measure_inner(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return DiLoCo's losses with AdamW and with Muon inside, by rate, and whether Muon's is lower.

    Each optimizer has the rate with the lowest mean over seeds.
    """
    local, losses = 16, dict[str, dict[str, list[float]]]()
    for name in ("adamw", "muon"):
        losses[name] = {str(rate): [] for rate in INNER_RATES}
        for rate, found in losses[name].items():
            inner = {"optimizer.name": name, "optimizer.lr": rate}
            for seed in range(options.seeds):
                settings = federated(options.steps // local, local, **DILOCO, **inner)
                rows = train(RECIPE, ["federate", "run"], {**settings, "run.seed": seed})
                found.append(final_loss(rows))
            print(f"{name:6} {rate:6} {mean(found):.4f}", flush=True)
    best = {name: min(map(mean, found.values())) for name, found in losses.items()}
    measured = {"steps": options.steps, "local_steps": local, "best": best, "losses": losses}
    return measured, best["muon"] < best["adamw"]


def measure_overhead(_: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the share of the time that is not training."""
    sizes = {"model.dim": 128, "model.n_layers": 5, "model.ffn_dim": 384}
    settings = federated(3, 50, **DILOCO, **sizes)
    rows = train(RECIPE, ["federate", "run"], {**settings, "evaluate.interval": 0})
    rounds = [row for row in rows if row["kind"] == "round"]
    seconds = sum(row["seconds"] for row in rounds)
    share = 1 - sum(row["train_seconds"] for row in rounds) / seconds
    parameters = rounds[0]["bytes_sent"] / CLIENTS / 4
    return {"parameters": parameters, "seconds": seconds, "outside_training": share}, share < 0.05


MEASURES = {
    "ordering": measure_ordering,
    "sparse": measure_sparse,
    "inner": measure_inner,
    "overhead": measure_overhead,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("--steps", type=int, default=512, help="optimizer steps of each client")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimizer")
    parser.add_argument("--seed", type=int, default=0, help="of `sparse`, which takes one")
    parser.add_argument("--keep", type=int, default=96, help="values of 4,096 that travel")
    parser.add_argument("--error-decay", type=float, default=0.95)
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results")
    options = parser.parse_args()
    measured, holds = MEASURES[options.what](options)
    print(json.dumps(measured, indent=1))
    if options.write:
        results.append("federated", {"what": options.what, **measured, "holds": holds})
    return int(not holds)


if __name__ == "__main__":
    raise SystemExit(main())
