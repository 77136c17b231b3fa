"""Which implementation serves each operation: decided once, readable afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from .attention import reference as attention
from .attention.local import attend
from .attention.partial import MATMUL, PartialAttention
from .attention.partial_sdpa import SDPA
from .cross_entropy import compiled as compiled_cross_entropy
from .cross_entropy import op as cross_entropy_op
from .cross_entropy import reference as cross_entropy
from .grouped_gemm import op as grouped_gemm
from .permute import permutation
from .permute.permutation import Permutation
from .rms_norm import op as rms_norm_op
from .rms_norm import reference as rms_norm
from .rotary import op as rotary_op
from .rotary import reference as rotary
from .swiglu import op as swiglu_op
from .swiglu import reference as swiglu

MATMUL_ATTENTION_UP_TO = 1024

IMPLEMENTATIONS: Mapping[str, Mapping[str, Any]] = {
    "attention": {
        "sdpa": partial(attend, attention.sdpa),
        "matmul": partial(attend, attention.matmul),
    },
    "rms_norm": {"torch": rms_norm.rms_norm, "triton": rms_norm_op.rms_norm},
    "rotary": {"torch": rotary.rotary, "triton": rotary_op.rotary},
    "swiglu": {"torch": swiglu.swiglu, "triton": swiglu_op.swiglu},
    "linear_cross_entropy": {
        "torch": cross_entropy.linear_cross_entropy,
        "compiled": compiled_cross_entropy.linear_cross_entropy,
        "triton": cross_entropy_op.linear_cross_entropy,
    },
    "grouped_gemm": {"torch": grouped_gemm.library_mm, "triton": grouped_gemm.grouped_mm},
    "permute": {"torch": permutation.TORCH, "triton": permutation.TRITON},
}

PARTIAL_ATTENTION = {each.name: each for each in (MATMUL, SDPA)}


class UnavailableKernelsError(Exception):
    """Implementations were asked for by name that cannot run here.

    Attributes:
        reasons: operation -> why not.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in reasons.items()))
        self.reasons = reasons


@dataclass(frozen=True)
class Kernels:
    """The functions a model is built with, and why each was chosen."""

    attention: Callable[..., Tensor]
    attention_mask: Callable[[Tensor, Tensor], Tensor]
    partial_attention: PartialAttention
    """goes with `attention`, where keys come in parts"""
    rms_norm: Callable[..., Tensor]
    rotary: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    linear_cross_entropy: Callable[..., Tensor]
    grouped_gemm: Callable[[Tensor, Tensor, Tensor], Tensor]
    permute: Permutation
    reasons: Mapping[str, str]
    """operation -> "implementation: why" (for the log and `trainer doctor`)"""


def choose(
    wanted: Mapping[str, str], device_type: str, seq_len: int, *, compiling: bool = False
) -> Kernels:
    """Return the implementations for a device and a row length.

    Args:
        wanted: operation -> name of an implementation, or "auto" (as for operations left out).
        device_type: "cpu" or "cuda".
        seq_len: tokens a row.
        compiling: whether the run pays for torch.compile anyway.

    Raises:
        KeyError: an operation or implementation is unknown.
        UnavailableKernelsError: an implementation cannot run on this device or machine.
    """
    names, reasons, faults = {}, {}, {}
    for operation, name in {**dict.fromkeys(IMPLEMENTATIONS, "auto"), **wanted}.items():
        reason = "asked for"
        if name == "auto":
            name, reason = _automatic(operation, device_type, seq_len, compiling)
        if name == "triton" and (fault := without_triton(device_type)):
            faults[operation] = fault
        names[operation] = name
        reasons[operation] = f"{name}: {reason}"
    if faults:
        raise UnavailableKernelsError(faults)
    return Kernels(
        **{operation: IMPLEMENTATIONS[operation][name] for operation, name in names.items()},
        attention_mask=attention.document_mask,
        partial_attention=PARTIAL_ATTENTION[names["attention"]],
        reasons=reasons,
    )


def without_triton(device_type: str) -> str:
    """Return why Triton's kernels cannot run, or nothing where they can."""
    if device_type != "cuda":
        return f"Triton's kernels run on a GPU, and this is a {device_type.upper()}"
    return "" if find_spec("triton") else "the package triton is not installed"


def _automatic(operation: str, device_type: str, seq_len: int, compiling: bool) -> tuple[str, str]:
    if operation == "attention":
        if device_type == "cpu" and seq_len <= MATMUL_ATTENTION_UP_TO:
            return "matmul", f"fastest on CPUs for rows of up to {MATMUL_ATTENTION_UP_TO} tokens"
        return "sdpa", "torch's fused attention"
    if operation == "linear_cross_entropy" and compiling:
        return "compiled", "blocks are compiled too"
    return "torch", "no other is measured to be faster"
