"""How fast checkpoints are converted, beside copying the same bytes, and in how much memory.

A copy (read and write of 8 MB blocks, as `cp` without reflinks does, then fsync of each file) and a
conversion take turns in one run, so that both see the same disk and the same load. Each runs in a
process of its own, which reports the time of the work and its largest resident memory.

    python benchmarks/convert.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results
import torch

PROMISED = 0.8
"""speed of a conversion as a share of a copy's"""
BOUND_BYTES = 10**9
"""memory beside twice the largest tensor"""
CONVERSIONS = {"hf2dcp": "hf", "dcp2hf": "dcp", "hf2hf": "hf"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5, help="conversions of each kind")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="append to benchmarks/results/")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured = measure(Path(folder), arguments.gigabytes, arguments.rounds)
    show(measured)
    if arguments.write:
        print(results.append("convert", measured))


def measure(folder: Path, gigabytes: float, rounds: int) -> dict[str, Any]:
    largest = make_model(folder / "hf", gigabytes)
    run_child("hf2dcp", folder / "hf", folder / "dcp")
    measured: dict[str, Any] = {
        "gigabytes": sum(file.stat().st_size for file in (folder / "hf").iterdir()) / 1e9,
        "largest_tensor_bytes": largest,
        "idle_peak_bytes": run_child("idle", folder, folder)["peak_bytes"],
        "memory_bound_bytes": 2 * largest + BOUND_BYTES,
    }
    for way, source in CONVERSIONS.items():
        pairs = []
        for number in range(rounds):
            turns = ["copy", way] if number % 2 else [way, "copy"]
            pair = {}
            for turn in turns:
                pair[turn] = run_child(turn, folder / source, folder / "out")
                shutil.rmtree(folder / "out")
            pairs.append(pair)
        ratios = [pair["copy"]["seconds"] / pair[way]["seconds"] for pair in pairs]
        measured[way] = {
            "seconds": [pair[way]["seconds"] for pair in pairs],
            "copy_seconds": [pair["copy"]["seconds"] for pair in pairs],
            "speed_ratio": statistics.median(ratios),
            "peak_bytes": max(pair[way]["peak_bytes"] for pair in pairs),
        }
    return measured


def make_model(folder: Path, gigabytes: float) -> int:
    """Write a Llama in bf16 with a vocabulary of 128,256; return its largest tensor's size."""
    from safetensors.torch import save_file

    from trainer.model_zoo.llama3.config import Llama3Config

    dim, layer_bytes = 1024, 2 * (2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 4096 * 1024)
    embedding = 2 * 128256 * dim
    n_layers = max(1, round((gigabytes * 1e9 - 2 * embedding) / layer_bytes))
    config = Llama3Config(
        dim=dim, n_layers=n_layers, n_heads=16, n_kv_heads=4, ffn_dim=4096, vocab_size=128256
    )
    from trainer.kernels.choose import choose

    with torch.device("meta"):
        model = config.build(choose({}, "cpu", 64))
    folder.mkdir()
    tensors = {
        config.layout.to_hf(name): torch.randint(0, 2**15, p.shape, dtype=torch.int16).view(
            torch.bfloat16
        )
        for name, p in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.hf_config()))
    return embedding


def run_child(what: str, source: Path, target: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def child(what: str, source: str, target: str) -> None:
    from trainer.engine.conversion import native  # noqa: F401 - imported before the clock starts
    from trainer.engine.conversion.convert import Options, convert

    start = time.perf_counter()
    if what == "copy":
        copy(Path(source), Path(target))
    elif what != "idle":
        convert(what, Path(source), Path(target), Options())
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """Return this process's largest resident memory; `ru_maxrss` would count its parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    buffer = memoryview(bytearray(2**23))
    for file in source.iterdir():
        read, write = (
            os.open(file, os.O_RDONLY),
            os.open(target / file.name, os.O_WRONLY | os.O_CREAT),
        )
        while count := os.readv(read, [buffer]):
            os.write(write, buffer[:count])
        os.fsync(write)
        os.close(read)
        os.close(write)


def show(measured: dict[str, Any]) -> None:
    rows = []
    for way in CONVERSIONS:
        found = measured[way]
        rows.append(
            [
                way,
                f"{statistics.median(found['seconds']):.2f} s",
                f"{statistics.median(found['copy_seconds']):.2f} s",
                f"{found['speed_ratio']:.0%} (promised {PROMISED:.0%})",
                f"{found['peak_bytes'] / 1e9:.2f} GB",
            ]
        )
    size, bound = measured["gigabytes"], measured["memory_bound_bytes"] / 1e9
    heads = [f"model of {size:.2f} GB", "converted", "copied", "speed", "memory"]
    print(results.table(heads, rows))
    idle = measured["idle_peak_bytes"] / 1e9
    print(f"memory: bound {bound:.2f} GB, of which {idle:.2f} GB are the imports")


if __name__ == "__main__":
    main()
