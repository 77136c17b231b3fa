"""Which implementation serves each operation: decided once, readable afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .attention.largest import largest_scores
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

CPU = 0
"""as a compute capability"""
# AMD's GPUs are not measured. Where no GPU is here, as in a simulation, an H100 is assumed.
UNKNOWN_GPU, AMPERE, HOPPER, BLACKWELL, SMALL_BLACKWELL = 1, 80, 90, 100, 110
FUSED = ("rotary", "swiglu", "linear_cross_entropy", "permute")
"""operations that are several kernels in eager mode and one of Triton's"""

LARGEST_SCORES = partial(attend, largest_scores)
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
    moe: Callable[..., Tensor] | None
    """see `moe.layer.fused_experts`; None: experts are computed by `grouped_gemm` and `permute`"""
    reasons: Mapping[str, str]
    """operation -> "implementation: why" (for the log and `trainer doctor`)"""

    def in_both_directions(self) -> Kernels:
        """Return kernels whose attention sees later positions too."""
        return replace(
            self,
            attention=partial(self.attention, causal=False),
            largest_scores=partial(self.largest_scores, causal=False),
            attention_mask=partial(self.attention_mask, causal=False),
        )

    def with_zero_centered_norms(self) -> Kernels:
        """Return kernels whose norms multiply by 1 + weight."""
        return replace(self, rms_norm=partial(zero_centered_rms_norm, self.rms_norm))

    def with_geglu(self) -> Kernels:
        """Return kernels whose gated activation is GeGLU, of which there is torch's alone."""
        return replace(self, swiglu=geglu)

    largest_scores: Callable[..., Tensor] = LARGEST_SCORES
    """see `attention.largest.largest_scores`; called as `attention` is"""
    vocabulary: VocabularyShard = WHOLE
    """the classes of the head's weight that this rank holds, for `log_probs` and `divergence`"""
    sequence: SequenceShard = WHOLE_SEQUENCES
    """the positions that this rank computes, for losses of whole sequences"""


def choose(
    wanted: Mapping[str, str],
    device_type: str,
    seq_len: int,
    *,
    compiling: bool = False,
    capability: int | None = None,
) -> Kernels:
    """Return the implementations for a device and a row length.

    Args:
        wanted: operation -> name of an implementation, or "auto" (as for operations left out).
        device_type: "cpu" or "cuda".
        seq_len: tokens a row.
        compiling: whether the run pays for torch.compile anyway.
        capability: see `choose_automatically`; None: that of the device in use.

    Raises:
        KeyError: an operation or implementation is unknown.
        UnavailableKernelsError: an implementation cannot run on this device or machine.
    """
    if capability is None:
        capability = _capability(device_type)
    chosen, reasons, faults = {}, {}, {}
    # All operations first, so that one error names every implementation that cannot run.
    for operation, name in {**dict.fromkeys(kernels, "auto"), **wanted}.items():
        reason = "requested"
        if name == "auto":
            name, reason = choose_automatically(
                operation, capability, compiled=compiling, seq_len=seq_len
            )
            # torch's implementations run everywhere; Triton is no dependency of this package.
            if fault := kernels[operation][name].obstacle(device_type):
                name, reason = "torch", fault
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


def choose_automatically(
    operation: str, capability: int, *, compiled: bool, seq_len: int
) -> tuple[str, str]:
    """Return the implementation that "auto" stands for, and why.

    Args:
        operation: a key of `registry.kernels`.
        capability: compute capability of the GPU, as 90 for 9.0; `CPU` for a CPU.
        compiled: whether torch.compile compiles the model's blocks.
        seq_len: tokens a row.
    """
    if operation == "attention":
        if capability == CPU and seq_len <= MATMUL_ATTENTION_UP_TO:
            return "matmul", f"fastest on CPUs for rows of up to {MATMUL_ATTENTION_UP_TO} tokens"
        return "sdpa", "torch's fused attention"
    if operation == "ragged_attention":
        if capability == CPU or UNKNOWN_GPU < capability < AMPERE:
            return "blocks", "samples of about one length at a time"
        return "varlen", "torch's flash attention for flat rows"
    if operation == "linear_cross_entropy" and compiled:
        return "compiled", "blocks are compiled too"
    # The fused experts took 0.97 of the others' time on an H200 (benchmarks/gpu_step.py): no reason
    # to refuse what they do not compute, which is float8, adapters, experts that ranks share.
    if capability == CPU or operation == "moe":
        return "torch", "fastest measured"
    if capability < AMPERE:
        return "torch", "no GPU of compute capability 8.0 or higher"
    if operation == "grouped_gemm":
        place = f"on compute capability {capability // 10}.{capability % 10}"
        # Elsewhere F.grouped_mm (torch 2.13, GroupedBlas.cpp) copies the offsets to the host and
        # launches a product for each expert.
        if capability == HOPPER or BLACKWELL <= capability < SMALL_BLACKWELL:
            return "torch", f"F.grouped_mm does not wait for the host {place}"
        return "triton", f"F.grouped_mm waits for the host {place}"
    if operation in FUSED:
        return ("torch", "torch.compile fuses it") if compiled else ("triton", "one kernel")
    return "torch", "one kernel of torch's own"


def _capability(device_type: str) -> int:
    if device_type != "cuda":
        return CPU
    if torch.version.hip:
        return UNKNOWN_GPU
    if not torch.cuda.is_available():
        return HOPPER
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
