"""Which implementation serves each operation: decided once, readable afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from .attention import reference as attention
from .attention.partial import MATMUL, PartialAttention
from .attention.partial_sdpa import SDPA
from .cross_entropy import compiled as compiled_cross_entropy
from .cross_entropy import reference as cross_entropy
from .rms_norm import reference as rms_norm
from .rotary import reference as rotary
from .swiglu import reference as swiglu

MATMUL_ATTENTION_UP_TO = 1024

IMPLEMENTATIONS: Mapping[str, Mapping[str, Callable[..., Tensor]]] = {
    "attention": {"sdpa": attention.sdpa, "matmul": attention.matmul},
    "rms_norm": {"torch": rms_norm.rms_norm},
    "rotary": {"torch": rotary.rotary},
    "swiglu": {"torch": swiglu.swiglu},
    "linear_cross_entropy": {
        "torch": cross_entropy.linear_cross_entropy,
        "compiled": compiled_cross_entropy.linear_cross_entropy,
    },
}

PARTIAL_ATTENTION = {each.name: each for each in (MATMUL, SDPA)}


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
    """
    names, reasons = {}, {}
    for operation, name in {**dict.fromkeys(IMPLEMENTATIONS, "auto"), **wanted}.items():
        reason = "asked for"
        if name == "auto":
            name, reason = _automatic(operation, device_type, seq_len, compiling)
        names[operation] = name
        reasons[operation] = f"{name}: {reason}"
    return Kernels(
        **{operation: IMPLEMENTATIONS[operation][name] for operation, name in names.items()},
        attention_mask=attention.document_mask,
        partial_attention=PARTIAL_ATTENTION[names["attention"]],
        reasons=reasons,
    )


def _automatic(operation: str, device_type: str, seq_len: int, compiling: bool) -> tuple[str, str]:
    if operation == "attention":
        if device_type == "cpu" and seq_len <= MATMUL_ATTENTION_UP_TO:
            return "matmul", f"fastest on CPUs for rows of up to {MATMUL_ATTENTION_UP_TO} tokens"
        return "sdpa", "torch's fused attention"
    if operation == "linear_cross_entropy" and compiling:
        return "compiled", "blocks are compiled too"
    return "torch", "needs no compiler"
