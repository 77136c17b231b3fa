from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from trainer.engine.observe.throughput import (
    Throughput,
    device_peak_flops,
    peak_flops,
    peak_memory_bytes,
)

ROOT = Path(__file__).resolve().parents[2]

# Names as drivers report them, with the data sheets' TFLOP/s: bf16 dense, fp32.
DATA_SHEETS = [
    ("NVIDIA H100 80GB HBM3", 1979 / 2, 67),
    ("NVIDIA H100 PCIe", 1513 / 2, 51),
    ("NVIDIA H100 NVL", 1671 / 2, 60),
    ("NVIDIA H200", 1979 / 2, 67),
    ("NVIDIA GH200 480GB", 1979 / 2, 67),
    ("NVIDIA H800", 1979 / 2, 67),
    ("NVIDIA B200", 4500 / 2, 75),
    ("NVIDIA GB200", 5000 / 2, 80),
    ("NVIDIA A100-SXM4-80GB", 624 / 2, 19.5),
    ("NVIDIA A100-PCIE-40GB", 624 / 2, 19.5),
    ("NVIDIA A100 80GB PCIe", 624 / 2, 19.5),
    ("NVIDIA A10G", 140 / 2, 31.5),
    ("NVIDIA A10", 250 / 2, 31.2),
    ("NVIDIA L40S", 733 / 2, 91.6),
    ("NVIDIA L4", 242 / 2, 30.3),
    ("NVIDIA GeForce RTX 4090", 330.4 / 2, 82.6),
    ("AMD Instinct MI300X", 2614.9 / 2, 163.4),
    ("AMD Instinct MI325X OAM", 2614.9 / 2, 163.4),
]


@pytest.mark.parametrize(("name", "bf16", "fp32"), DATA_SHEETS)
def test_peaks_are_those_of_the_data_sheets_without_sparsity(
    name: str, bf16: float, fp32: float
) -> None:
    assert peak_flops(name, "bf16") == pytest.approx(bf16 * 1e12, rel=0.02)
    assert peak_flops(name, "fp16") == peak_flops(name, "bf16")
    assert peak_flops(name, "fp32") == pytest.approx(fp32 * 1e12, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID A100-10C",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce GTX 1080",
        "NVIDIA H1000",
        "",
    ],
)
def test_a_wrong_peak_is_worse_than_none(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_gpus_without_bf16_have_a_peak_for_fp16_only() -> None:
    assert peak_flops("Tesla T4", "bf16") is None
    assert peak_flops("Tesla T4", "fp16") == 65e12
    assert peak_flops("Tesla V100-SXM2-16GB", "fp16") == 125e12


def test_cpus_have_no_peak() -> None:
    assert device_peak_flops(torch.device("cpu"), "bf16") is None


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def describe(batches: int) -> dict[str, int]:
    return {"samples": 8 * batches}


def test_rates_are_means_since_the_last_reading() -> None:
    clock = Clock()
    throughput = Throughput("tokens", describe, lambda *_: 3e9, peak_flops=1e12, clock=clock)
    throughput.start(10, 10_000)
    for seconds in (1.0, 3.0):
        clock.now += seconds
    rates = throughput.read(12, 12_000, 12)
    assert (rates["tokens_per_second"], rates["step_seconds"]) == (500, 2)
    assert rates["mfu"] == pytest.approx(500 * 3e9 / 1e12)
    clock.now += 1
    assert throughput.read(13, 13_000, 13)["tokens_per_second"] == 1000


def test_evaluations_and_the_wait_for_data_are_told_apart() -> None:
    clock = Clock()
    throughput = Throughput("tokens", describe, lambda *_: 1.0, None, clock)

    def data():
        for item in range(2):
            clock.now += 0.25
            yield item

    throughput.start(0, 0)
    for _ in throughput.measure_waits(data()):
        clock.now += 1.0
    with throughput.exclude_time():
        clock.now += 30.0
    rates = throughput.read(2, 50, 2)
    assert rates["step_seconds"] == pytest.approx(1.25)
    assert rates["data_seconds"] == pytest.approx(0.25)
    assert rates["tokens_per_second"] == pytest.approx(20)
    assert rates["mfu"] is None


def peaks_of_a_child(code: str) -> list[int]:
    code = f"from trainer.engine.observe.throughput import resident_peak_bytes as peak\n{code}"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_the_peak_memory_of_a_cpu_run_counts_what_was_freed_again() -> None:
    before, after = peaks_of_a_child("print(peak()); b'x' * 2**27; print(peak())")
    assert before + 2**27 - 2**24 < after < before + 2**27 + 2**24


@pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="torch with CUDA alone takes more than the ballast"
)
def test_the_peak_memory_of_a_child_is_its_own_and_not_its_parents() -> None:
    ballast = np.ones(2**28, dtype=np.uint8)
    assert 2**22 < peaks_of_a_child("print(peak())")[0] < ballast.size


def test_the_peak_memory_of_this_device_is_at_least_what_is_in_use() -> None:
    assert peak_memory_bytes(torch.device("cpu")) >= psutil.Process().memory_info().rss * 0.9
