"""Compiles `device.cpp` and loads it. This must happen before torch is imported."""

import ctypes
import os
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from trainer.engine.core.files import make_private

SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(tempfile.gettempdir()) / f"trainer-imaginary-cuda-{os.getuid()}"


@cache
def load_guard() -> ctypes.CDLL:
    """Load the library, whose hooks torch finds only if they are there before its own."""
    assert "torch" not in sys.modules, "torch has asked for CUDA's hooks already"
    return ctypes.CDLL(str(compile_guard(FOLDER)))


def compile_guard(folder: Path) -> Path:
    """Compile `device.cpp` against the installed PyTorch, once for each version of both."""
    spec = find_spec("torch")
    assert spec
    assert spec.submodule_search_locations
    (torch,) = map(Path, spec.submodule_search_locations)
    key = sha256(SOURCE.read_bytes() + version("torch").encode() + bytes(torch)).hexdigest()[:16]
    make_private(folder, "TMPDIR")  # also where the file is there: another user may have put it
    made = folder / f"{key}.so"
    if not made.exists():
        own = folder / f"{made.name}.{os.getpid()}"
        include, library = torch / "include", torch / "lib"
        paths = include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"]
        flags = ["-shared", "-fPIC", "-std=c++20", "-w", *(f"-I{path}" for path in paths)]
        links = [f"-L{library}", f"-Wl,-rpath,{library}", "-lc10", "-ltorch_cpu"]
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *flags, str(SOURCE), *links, "-o", str(own)], check=True)
        own.rename(made)  # other processes see a whole file or none
    return made
