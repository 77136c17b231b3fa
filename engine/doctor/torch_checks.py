"""The checks of `trainer doctor` that need torch: devices, process groups, kernels."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ...kernels.choose import choose
from ...kernels.registry import without_triton
from ...kernels.torch_private import FileStore
from ..data.tables import Data
from ..launch.assembler import choose_assembler
from ..launch.group import takes_mps
from ..observe.throughput import device_peak_flops
from ..precision.hardware import multiplies_bf16, multiplies_low_precision
from .machine import GIB, Finding, cpu_name


def check_devices() -> Iterator[Finding]:
    """Yield the devices, and what they compute in hardware."""
    threads = f"{torch.get_num_threads()} threads for torch"
    yield Finding("cpu", "ok", f"{cpu_name()}, {os.cpu_count()} cores, {threads}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    elif takes_mps():
        text = "Apple's GPU, for runs of one process; sums are float32; not tested"
        yield Finding("mps", "note", text)
        devices.append(torch.device("mps"))
    for device in devices:
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory / GIB
            peak = device_peak_flops(device, "bf16")
            known = f"{peak / 1e12:g} TFLOP/s in bf16" if peak else "peak unknown: no MFU"
            name = torch.cuda.get_device_name(device)
            yield Finding(str(device), "ok", f"{name}, {memory:.0f} GiB, {known}")
            capability = torch.cuda.get_device_capability(device)
            assembler = choose_assembler(capability, torch.version.cuda)
            yield Finding(f"{device} assembler", "ok", assembler.reason)
        native, reason = multiplies_bf16(device)
        word = "bf16" if native else "fp32"
        yield Finding(f"{device} computes in", "ok", f'{word} with compute = "auto": {reason}')
        for narrow in ("float8", "mx"):
            native, reason = multiplies_low_precision(narrow, device)
            how = "in hardware" if native else "emulated only"
            yield Finding(f"{device} {narrow}", "ok", f"{how}: {reason}")


def check_process_groups() -> Iterator[Finding]:
    """Yield the backends of process groups, and whether one works."""
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    backends = [name for name, present in available.items() if present]
    yield Finding("backends", "ok", ", ".join(backends))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
    milliseconds = (time.perf_counter() - started) * 1e3
    yield Finding("gloo", "ok", f"a group of one process works ({milliseconds:.0f} ms)")


def check_kernels() -> Iterator[Finding]:
    """Yield which implementation of each kernel would be chosen here."""
    device_type = "cuda" if torch.cuda.is_available() else "mps" if takes_mps() else "cpu"
    yield Finding("kernels by triton", "ok", without_triton(device_type) or "can be chosen")
    for operation, reason in choose({}, device_type, Data().seq_len).reasons.items():
        yield Finding(f"kernel {operation}", "ok", reason)
