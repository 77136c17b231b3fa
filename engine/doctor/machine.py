"""What `trainer doctor` looks at: versions, devices, process groups, kernels, disk, extras."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from ..core.errors import TrainerError
from ..core.run_dir import RunDirectory
from ..data.tables import Data
from ..launch.environment import find_world

CORE = ("torch", "triton", "numpy", "pydantic", "safetensors", "torchdata", "typer", "rich")
PROBE_BYTES = 2**26
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    subject: str
    state: Literal["ok", "note", "bad"]
    """"note": something is missing that not everybody needs; "bad": runs will fail"""
    text: str
    hint: str = ""


def examine(runs: Path) -> Iterator[Finding]:
    """Yield what is found on this machine; `runs` is the folder where runs are kept.

    A check that fails in a way we did not foresee is a bad finding and not the end.
    """
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "versions": _versions,
        "extras": _extras,
        "job": _job,
        "devices": _devices,
        "process groups": _process_groups,
        "kernels": _kernels,
        "runs folder": lambda: _folder(runs),
    }
    for subject, check in checks.items():
        try:
            yield from check()
        except Exception as error:
            hint = error.hint if isinstance(error, TrainerError) else ""
            yield Finding(subject, "bad", str(error) or type(error).__name__, hint)


def _versions() -> Iterator[Finding]:
    from ... import __version__

    yield Finding("trainer", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for package in CORE:
        found = _version(package)
        yield Finding(package, "ok" if found else "note", found or "not installed")


def _extras() -> Iterator[Finding]:
    """Yield whether each optional package is installed, and how to get it."""
    try:
        wanted = requires("trainer") or []
    except PackageNotFoundError:
        yield Finding("extras", "note", "trainer runs from its sources, not from an installation")
        return
    for line in wanted:
        match = re.match(r"([\w.-]+).*extra\s*==\s*['\"](\w+)['\"]", line)
        if match and match[2] != "dev":
            package, extra = match.groups()
            subject = f"extra [{extra}]"
            if found := _version(package):
                yield Finding(subject, "ok", f"{package} {found}")
            else:
                hint = f"pip install 'trainer[{extra}]'"
                yield Finding(subject, "note", f"{package} is not installed", hint)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _job() -> Iterator[Finding]:
    world = find_world()
    if world.world_size == 1:
        yield Finding("job", "note" if world.note else "ok", world.note or "one process")
    else:
        text = f"rank {world.rank} of {world.world_size}, started by {world.launcher}"
        yield Finding("job", "ok", f"{text}, rendezvous at {world.rendezvous}")


def _devices() -> Iterator[Finding]:
    import torch

    from ..observe.throughput import device_peak_flops
    from ..precision.hardware import multiplies_bf16, multiplies_narrow

    threads = f"{torch.get_num_threads()} threads for torch"
    yield Finding("cpu", "ok", f"{_cpu_name()}, {os.cpu_count()} cores, {threads}")
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory / GIB
            peak = device_peak_flops(device, "bf16")
            known = f"{peak / 1e12:g} TFLOP/s in bf16" if peak else "peak unknown: no MFU"
            name = torch.cuda.get_device_name(device)
            yield Finding(str(device), "ok", f"{name}, {memory:.0f} GiB, {known}")
        native, reason = multiplies_bf16(device)
        word = "bf16" if native else "fp32"
        yield Finding(f"{device} computes in", "ok", f'{word} with compute = "auto": {reason}')
        for narrow in ("float8", "mx"):
            native, reason = multiplies_narrow(narrow, device)
            how = "in hardware" if native else "emulated only"
            yield Finding(f"{device} {narrow}", "ok", f"{how}: {reason}")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _process_groups() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

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


def _kernels() -> Iterator[Finding]:
    import torch

    from ...kernels.choose import choose
    from ...kernels.registry import without_triton

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    yield Finding("kernels by triton", "ok", without_triton(device_type) or "can be chosen")
    for operation, reason in choose({}, device_type, Data().seq_len).reasons.items():
        yield Finding(f"kernel {operation}", "ok", reason)


def _folder(runs: Path) -> Iterator[Finding]:
    """Yield whether runs can be kept there, in a folder that is removed again."""
    place = next(each for each in (runs.absolute(), *runs.absolute().parents) if each.exists())
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
        with RunDirectory(Path(folder) / "run"):
            yield Finding("runs folder", "ok", f"{runs.absolute()} can be written and locked")
        free = shutil.disk_usage(folder).free
        speed = write_speed(Path(folder) / "probe") if free > 2 * PROBE_BYTES else 0.0
    yield Finding(
        "disk",
        "ok" if free > GIB else "note",
        f"{free / GIB:.1f} GiB free, writes {speed / 2**20:,.0f} MiB/s",
        "" if free > GIB else "checkpoints may not fit",
    )


def write_speed(path: Path) -> float:
    """Return bytes per second of writing and syncing 64 MiB of random bytes."""
    block = os.urandom(2**20)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return PROBE_BYTES / (time.perf_counter() - started)
