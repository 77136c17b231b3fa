"""Which dtypes a device multiplies in hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What Linux calls the instructions: x86 lists `flags`, Arm lists `Features` (Linux: cpuinfo).
_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def multiplies_bf16(device: torch.device) -> tuple[bool, str]:
    """Return whether the device multiplies bf16 matrices in hardware, and why one thinks so.

    A CPU does with AMX or AVX512-BF16 (x86) or BF16 (Arm), and if torch was built with oneDNN,
    which uses them. An NVIDIA GPU does from compute capability 8.0 on.
    """
    import torch

    if device.type == "cpu":
        flag = bf16_instructions()
        if not flag:
            return False, "this CPU has neither AMX-BF16 nor AVX512-BF16"
        if not torch._C._has_mkldnn:
            return False, f"this CPU has {flag}, but torch was built without oneDNN"
        return True, f"this CPU has {flag}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.version.hip:
            return True, f"{name} has bf16 matrix cores"
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"{name} has compute capability {major}.{minor}"
    return False, f"nothing is known about {device.type} devices"


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name for its bf16 matrix or dot products, or an empty string."""
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            words = set(value.split())
            return next((flag for flag in _CPU_FLAGS if flag in words), "")
    return ""
