"""Chooses the assembler that Triton uses for a GPU. Torch-free."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import MutableMapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ASSEMBLER = "TRITON_PTXAS_PATH"
HOPPER = (9, 0)
FIRST_FIXED_TRITON = (3, 9)
"""the first Triton whose own assembler for compute capability 9.0 is newer than 13.0"""


@dataclass(frozen=True)
class AssemblerChoice:
    """The program that turns Triton's PTX into machine code.

    Attributes:
        path: the value of `TRITON_PTXAS_PATH`; None: Triton decides.
        reason: which assembler it is, and why.
    """

    path: str | None
    reason: str


def choose_assembler(
    capability: tuple[int, int],
    cuda: str | None,
    environ: MutableMapping[str, str] | None = None,
) -> AssemblerChoice:
    """Choose Triton's assembler for a GPU, without importing Triton.

    The ptxas 12.8 that Triton 3.6 and 3.7 use for compute capability 9.0 makes code that reads
    outside of its arrays or gives wrong numbers (triton issues 10486 and 11366). The same wheel
    has a newer ptxas for Blackwell, which assembles for 9.0 too.

    Args:
        capability: the compute capability of the GPU.
        cuda: the CUDA version that torch was built for, such as "13.0"; None: not for CUDA.
        environ: the environment variables.
    """
    environ = os.environ if environ is None else environ
    if own := environ.get(ASSEMBLER):
        return AssemblerChoice(own, f"{own}: {ASSEMBLER} is set")
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return AssemblerChoice(None, "none: Triton is not installed")
    usual = f"the usual one of Triton {triton}"
    if cuda is None or capability != HOPPER or _numbers(triton) >= FIRST_FIXED_TRITON:
        return AssemblerChoice(None, f"{usual}: no defect of it is known on this GPU")
    folder = _triton_folder()
    newer = folder / "ptxas-blackwell"
    release, before = _release(newer), _release(folder / "ptxas")
    if release <= before:
        return AssemblerChoice(None, f"{usual}: this Triton has no newer one")
    # A driver loads code of its own CUDA's major version or older.
    if release[0] > _numbers(cuda)[0]:
        why = f"ptxas {_text(release)} needs a driver that torch for CUDA {cuda} does not ask for"
        return AssemblerChoice(None, f"{usual}: {why}")
    why = f"{_text(before)} makes wrong code for compute capability 9.0"
    return AssemblerChoice(str(newer), f"ptxas {_text(release)} of Triton {triton}: {why}")


def set_assembler(
    capability: tuple[int, int],
    cuda: str | None,
    environ: MutableMapping[str, str] | None = None,
) -> None:
    """Set `TRITON_PTXAS_PATH` as `choose_assembler` says. Call it before Triton compiles."""
    if path := choose_assembler(capability, cuda, environ).path:
        (os.environ if environ is None else environ)[ASSEMBLER] = path


def _triton_folder() -> Path:
    """Return the folder of Triton's assemblers; finding a package does not import it."""
    spec = find_spec("triton")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0] if locations else "", "backends/nvidia/bin")


def _release(program: Path) -> tuple[int, ...]:
    """Return the release of a ptxas, such as (13, 1); () if it does not run."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return _numbers(found[1]) if found else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
