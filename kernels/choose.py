"""Which implementation serves each operation: decided once, readable afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from .attention.local import Mask, attend
from .attention.partial import MATMUL, PartialAttention
from .attention.partial_sdpa import SDPA
from .attention.reference import document_mask
from .attention.varlen import attend_rows, find_documents, has_flash
from .permute.permutation import Permutation
from .registry import kernels, load
from .rms_norm.reference import zero_centered_rms_norm
from .sequence import WHOLE_SEQUENCES, SequenceShard
from .swiglu.reference import geglu
from .vocabulary import WHOLE, VocabularyShard

MATMUL_ATTENTION_UP_TO = 1024

PARTIAL_ATTENTION = {implementation.name: implementation for implementation in (MATMUL, SDPA)}


class UnavailableKernelsError(Exception):
    """A choice names implementations that cannot run here.

    Attributes:
        reasons: operation -> why its implementation cannot run.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in reasons.items()))
        self.reasons = reasons


@dataclass(frozen=True)
class Kernels:
    """The functions a model is built with, and why each was chosen."""

    attention: Callable[..., Tensor]
    """see `attention.local.attend`, less its first argument"""
    attention_mask: Callable[..., Mask]
    """see `attention.varlen.find_documents`"""
    ragged_attention: Callable[..., Tensor]
    """what `attention` does with flat rows; see `attention.ragged.attend_in_blocks`"""
    partial_attention: PartialAttention
    """goes with `attention`, where keys come in parts"""
    rms_norm: Callable[..., Tensor]
    """see `rms_norm.reference.rms_norm`"""
    rotary: Callable[..., Tensor]
    """see `rotary.reference.rotary`"""
    swiglu: Callable[..., Tensor]
    """see `swiglu.reference.swiglu`"""
    linear_cross_entropy: Callable[..., Tensor]
    """see `cross_entropy.reference.linear_cross_entropy`"""
    grouped_gemm: Callable[[Tensor, Tensor, Tensor], Tensor]
    """see `grouped_gemm.op.library_mm`"""
    permute: Permutation
    """see `permute.permutation`"""
    reasons: Mapping[str, str]
    """operation -> "implementation: why" (for the log and `trainer doctor`)"""

    def in_both_directions(self) -> Kernels:
        """Return kernels whose attention sees later positions too."""
        return replace(
            self,
            attention=partial(self.attention, causal=False),
            attention_mask=partial(self.attention_mask, causal=False),
        )

    def with_zero_centered_norms(self) -> Kernels:
        """Return kernels whose norms multiply by 1 + weight."""
        return replace(self, rms_norm=partial(zero_centered_rms_norm, self.rms_norm))

    def with_geglu(self) -> Kernels:
        """Return kernels whose gated activation is GeGLU, of which there is torch's alone."""
        return replace(self, swiglu=geglu)

    vocabulary: VocabularyShard = WHOLE
    """the classes of the head's weight that this rank holds, for `log_probs` and `divergence`"""
    sequence: SequenceShard = WHOLE_SEQUENCES
    """the positions that this rank computes, for losses of whole sequences"""


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
    chosen, reasons, faults = {}, {}, {}
    # All operations first, so that one error names every implementation that cannot run.
    for operation, name in {**dict.fromkeys(kernels, "auto"), **wanted}.items():
        reason = "requested"
        if name == "auto":
            name, reason = _automatic(operation, device_type, seq_len, compiling)
        implementation = kernels[operation][name]
        reasons[operation] = f"{name}: {reason}"
        if fault := implementation.obstacle(device_type):
            faults[operation] = fault
            continue
        try:
            chosen[operation] = load(implementation.target)
        except Exception as error:  # a plugin's module can fail in any way
            faults[operation] = (
                f"{implementation.target} cannot be imported: {type(error).__name__}: {error}"
            )
    if faults:
        raise UnavailableKernelsError(faults)
    attention = reasons["attention"].partition(":")[0]
    varlen = None
    if attention == "sdpa" and device_type == "cuda" and has_flash():
        varlen = attend_rows
    ragged = chosen["ragged_attention"]
    return Kernels(
        **{
            **chosen,
            "attention": partial(attend, chosen["attention"], ragged=ragged, varlen=varlen),
        },
        attention_mask=document_mask if varlen is None else find_documents,
        # A plugin's attention has no partial form; torch's computes the same.
        partial_attention=PARTIAL_ATTENTION.get(attention, SDPA),
        reasons=reasons,
    )


def _automatic(operation: str, device_type: str, seq_len: int, compiling: bool) -> tuple[str, str]:
    if operation == "attention":
        if device_type == "cpu" and seq_len <= MATMUL_ATTENTION_UP_TO:
            return "matmul", f"fastest on CPUs for rows of up to {MATMUL_ATTENTION_UP_TO} tokens"
        return "sdpa", "torch's fused attention"
    if operation == "ragged_attention":
        if device_type == "cuda":
            return "varlen", "torch's flash attention for flat rows"
        return "blocks", "samples of about one length at a time"
    if operation == "linear_cross_entropy" and compiling:
        return "compiled", "blocks are compiled too"
    return "torch", "fastest measured"
