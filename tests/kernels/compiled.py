"""Compile what our launch wrappers launch, for a GPU that is not there.

    for kernel in compiled(launch_product, arch=90, triton="3.6.0"):
        assert kernel.spill_bytes == 0

In a child process a driver without a device stands in for Triton's own. Wrappers run on CPU
tensors; each kernel is specialised and compiled as on that GPU, what the compiler made of it is
recorded, and nothing is launched. Triton's wheel holds all that this needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.child import Child

OLDER = os.environ.get("TRAINER_TRITON_3_6")
"""A folder with triton 3.6.0, as `pip install --no-deps --target FOLDER triton==3.6.0` makes it."""

on_each_triton = pytest.mark.parametrize(
    "triton",
    [
        "3.7.1",
        pytest.param(
            "3.6.0",
            marks=pytest.mark.skipif(not OLDER, reason="TRAINER_TRITON_3_6 names no folder"),
        ),
    ],
)

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""What one block may use (CUDA C++ Programming Guide, table of compute capabilities)."""
PROCESSORS = {80: 108, 90: 132, 100: 148}
INSTRUCTIONS = (
    "HGMMA QGMMA HMMA QMMA UTMALDG UTMASTG LDGSTS USETMAXREG LDL STL UTCHMMA UTCQMMA FFMA ATOM "
    "ATOMG RED LDG LDG128"  # global loads, and those of 16 bytes a thread
)

USAGE = re.compile(r"\b(REG|STACK|LOCAL):(\d+)")
OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Compilation:
    """A kernel as it was compiled: one for each set of constants and specialised arguments."""

    name: str
    constants: dict[str, Any]
    warps: int
    """With those that warp specialisation adds."""
    stages: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    instructions: dict[str, int]
    """How often each of INSTRUCTIONS stands in the code; those that do not are left out."""
    grid: tuple[int, int, int]
    """Of its first launch."""


def compiled(
    function: Callable[..., Any], *args: Any, arch: int = 90, triton: str = "3.7.1"
) -> list[Compilation]:
    """Return what is compiled where `function(*args)` launches kernels, in order.

    Args:
        function: a top-level function that calls launch wrappers on CPU tensors.
        args: its arguments.
        arch: compute capability; 90 is Hopper.
        triton: which version; 3.7.1 stands for the one that is installed.

    Raises:
        AssertionError: it raised there, or a kernel does not compile or fit.
    """
    found: list[Compilation] = _child(triton).call(record, function, args, arch)
    return found


@cache
def _child(version: str) -> Child:
    path = OLDER if version == "3.6.0" else None
    if path is None and version == "3.6.0":
        raise AssertionError("TRAINER_TRITON_3_6 names no folder with triton 3.6.0")
    return Child({"TRITON_INTERPRET": "0", "EXPECTED_TRITON": version}, check_version, path=path)


def check_version() -> None:
    """Fail where another minor version than the wanted one would be measured."""
    import triton

    wanted = os.environ["EXPECTED_TRITON"]
    assert triton.__version__.split(".")[:2] == wanted.split(".")[:2], triton.__version__


def record(function: Callable[..., Any], args: tuple[Any, ...], arch: int) -> list[Compilation]:
    """Call a function with the driver that launches nothing; return what was compiled."""
    from triton.runtime import driver

    dry = DryDriver(arch)
    before = driver._active
    driver.set_active(dry)
    try:
        function(*args)
    finally:
        driver._active = before
    return list({id(kernel): kernel for kernel in dry.launched}.values())


class DryDriver:
    """A driver as Triton wants it, for a GPU that is not there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.launched: list[Compilation] = []
        self.utils = SimpleNamespace(
            get_device_properties=self._properties,
            load_binary=self._load,
            unload_module=lambda module: None,
        )

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing can be timed without a device: no kernel may autotune")

    def get_current_device(self) -> int:
        # A kernel remembers its target by device, so each target is a device of its own.
        return self.arch

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def _properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_BYTES[self.arch],
            "multiprocessor_count": PROCESSORS[self.arch],
            "max_num_regs": 65_536,
            "warpSize": 32,
        }

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what is called for each launch. Triton loads the binary right after."""
        self.compiling = (source, metadata)

        def launch(x: int, y: int, z: int, stream: int, kernel: Any, *_: Any) -> None:
            # The function belongs to the driver that was active when it was compiled.
            from triton.runtime import driver

            if not kernel:
                kernel.append(_describe(source, metadata, kernel.binary, (x, y, z)))
            driver.active.launched.append(kernel[0])

        return launch

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), Handle(binary), 0, 0, 1024


class Handle(list[Compilation]):
    """What a launch receives as the kernel: its binary, and later its description."""

    def __init__(self, binary: bytes) -> None:
        super().__init__()
        self.binary = binary


def _describe(source: Any, metadata: Any, binary: bytes, grid: tuple[int, int, int]) -> Compilation:
    names = source.fn.arg_names
    usage = dict(USAGE.findall(_tool("cuobjdump", binary, "-res-usage")))
    listing = _tool("nvdisasm", binary, "-c")
    assembly = Counter(OPCODE.findall(listing))
    assembly["LDG128"] = len(re.findall(r"LDG\.[\w.]*128", listing))
    return Compilation(
        name=metadata.name,
        constants={names[place[0]]: value for place, value in source.constants.items()},
        warps=metadata.num_warps,
        stages=metadata.num_stages,
        shared_bytes=metadata.shared,
        registers=int(usage["REG"]),
        spill_bytes=int(usage["STACK"]) + int(usage["LOCAL"]),
        instructions={name: assembly[name] for name in INSTRUCTIONS.split() if assembly[name]},
        grid=grid,
    )


def _tool(name: str, binary: bytes, option: str) -> str:
    """Return what one of the CUDA tools in Triton's wheel says of a binary."""
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__path__[0]) / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(path), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
