"""Which dtypes a device multiplies in hardware, the dtype of a step, and the loss scale of fp16."""

from __future__ import annotations

from pathlib import Path

import torch

from ...kernels.registry import without_triton
from ...kernels.torch_private import has_mkldnn
from ...model_zoo.config import ModelConfig
from ..core.errors import EnvironmentFault
from .choose import select_weights
from .tables import Precision

# What Linux calls the instructions: x86 lists `flags`, Arm lists `Features` (Linux: cpuinfo).
_CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def multiplies_bf16(device: torch.device) -> tuple[bool, str]:
    """Return whether the device multiplies bf16 matrices in hardware, and the reason in words.

    A CPU does with AMX or AVX512-BF16 (x86) or BF16 (Arm), and if torch was built with oneDNN,
    which uses them. An NVIDIA GPU does from compute capability 8.0 on.
    """
    if device.type == "cpu":
        flag = bf16_instructions()
        if not flag:
            return False, "this CPU has neither AMX-BF16 nor AVX512-BF16"
        if not has_mkldnn:
            return False, f"this CPU has {flag}, but torch was built without oneDNN"
        return True, f"this CPU has {flag}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.version.hip:
            return True, f"{name} has bf16 matrix cores"
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"{name} has compute capability {major}.{minor}"
    if device.type == "mps":
        return False, "which of Apple's GPUs multiply bf16 in hardware, torch does not say"
    return False, f"nothing is known about {device.type} devices"


def multiplies_low_precision(word: str, device: torch.device) -> tuple[bool, str]:
    """Return whether the device multiplies float8 or MX matrices in hardware, and the reason.

    An NVIDIA GPU does from compute capability 8.9 (float8) or 10.0 (MXFP8) on.

    Args:
        word: "float8" or "mx".
        device: the device of a rank.
    """
    if device.type != "cuda" or torch.version.hip:
        kind = "AMD's GPUs" if device.type == "cuda" else f"this {device.type.upper()}"
        return False, f"it is for NVIDIA's GPUs, not for {kind}"
    least = {"float8": (8, 9), "mx": (10, 0)}[word]
    name, has = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    text = "{} has compute capability {}.{}".format(name, *has)
    return has >= least, text if has >= least else text + ", under {}.{}".format(*least)


def require_formats(table: Precision, config: ModelConfig, device: torch.device) -> None:
    """Refuse formats that the device lacks and that are not emulated.

    Raises:
        EnvironmentFault: the device lacks a format, or Triton is missing for our own kernels.
    """
    for word, format_table in table.low_precision.items():
        native, reason = multiplies_low_precision(word, device)
        if device.type == "mps":
            raise EnvironmentFault(
                f"precision.{word} cannot run on Apple's GPU (MPS), which has no such dtype",
                ON_CPU,
            )
        if not native and not format_table.emulate:
            raise EnvironmentFault(
                f"precision.{word} cannot run here: {reason}",
                f"set precision.{word}.emulate = true to compute what it would, more slowly",
            )
    # Experts multiply in our own Triton kernel, which emulates nothing on a GPU, whatever the table
    # says; projections are torchao's.
    experts = any(map(config.layout.is_expert, select_weights(table.float8, config)))
    if experts and device.type == "cuda":
        native, reason = multiplies_low_precision("float8", device)
        if missing := without_triton("cuda") if native else reason:
            raise EnvironmentFault(
                f"experts in float8 are not emulated on a GPU, and cannot run here: {missing}",
                'set precision.float8.exclude = ["*.experts.*"]',
            )


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


ON_CPU = "set TRAINER_DEVICE=cpu in the environment, or leave it out"

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,  # no recipe can say it: plans are compared in it
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the recipe's word for a dtype."""
    return next(name for name, known in DTYPES.items() if known is dtype)


def compute_dtype(table: Precision, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of a step on `device` and why it was chosen.

    Raises:
        EnvironmentFault: fp16 on a device that does not train in it.
    """
    if table.compute == "auto":
        native, reason = multiplies_bf16(device)
        return (torch.bfloat16 if native else torch.float32), reason
    if table.compute == "fp16" and device.type != "cuda":
        raise EnvironmentFault(
            f'precision.compute = "fp16" needs a GPU; this run is on {device.type}',
            'use "bf16" or "fp32"',
        )
    return DTYPES[table.compute], "as the recipe says"


class LossScale:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    Doubles after 2,000 good steps in a row and halves at each overflow; 1 for other dtypes.
    """

    growth_interval = 2000

    def __init__(self, dtype: torch.dtype) -> None:
        self.dynamic = dtype is torch.float16
        # Start, growth and fall are the defaults of torch.amp.GradScaler.
        self.value = 2.0**16 if self.dynamic else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Adapt the scale to whether the last step's gradients were finite."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint's manifest stores."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Set the state that `state` returned."""
        self.value, self.good_steps = state["value"], int(state["good_steps"])
