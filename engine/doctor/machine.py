"""The checks of `trainer doctor` that need no torch: versions, extras, launcher, disk."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from ... import __version__
from ..core.extras import DISTRIBUTION, install_command
from ..core.run_dir import RunDirectory
from ..launch.environment import find_world

CORE = ("torch", "triton", "numpy", "pydantic", "safetensors", "torchdata", "typer", "rich")
PROBE_BYTES = 2**26
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    subject: str
    state: Literal["ok", "note", "bad"]
    """"note": an optional thing is missing; "bad": runs will fail"""
    text: str
    hint: str = ""


def check_versions() -> Iterator[Finding]:
    """Yield the versions of trainer, Python and the packages that it needs."""
    yield Finding("trainer", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for package in CORE:
        installed = _version(package)
        yield Finding(package, "ok" if installed else "note", installed or "not installed")


def check_extras() -> Iterator[Finding]:
    """Yield whether each optional package is installed, and how to get it."""
    try:
        wanted = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        yield Finding("extras", "note", "trainer runs from its sources, not from an installation")
        return
    for line in wanted:
        match = re.match(r"([\w.-]+).*extra\s*==\s*['\"](\w+)['\"]", line)
        if match and match[2] != "dev":
            package, extra = match.groups()
            subject = f"extra [{extra}]"
            if installed := _version(package):
                yield Finding(subject, "ok", f"{package} {installed}")
            else:
                hint = install_command(extra)
                yield Finding(subject, "note", f"{package} is not installed", hint)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def check_job() -> Iterator[Finding]:
    """Yield which launcher started this process."""
    world = find_world()
    if world.world_size == 1:
        yield Finding("job", "note" if world.note else "ok", world.note or "one process")
    else:
        text = f"rank {world.rank} of {world.world_size}, started by {world.launcher}"
        yield Finding("job", "ok", f"{text}, rendezvous at {world.rendezvous}")


def cpu_name() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def check_folder(runs: Path) -> Iterator[Finding]:
    """Yield whether run directories can be created and locked, and the disk's space and speed.

    Args:
        runs: the folder of the runs; a temporary folder is made there, or in the nearest parent.
    """
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
    """Write and sync 64 MiB of random bytes, and return the bytes per second."""
    block = os.urandom(2**20)
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return PROBE_BYTES / (time.perf_counter() - started)
