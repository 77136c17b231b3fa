"""The inner part of the chunked cross entropy as one kernel; see the reference for the formula."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..operators import require_float
from .reference import IGNORED

# A block of columns at a time: 16 numbers a thread with 16 warps.
_WIDEST = 2**13


def replace_by_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the losses of some rows and their z terms, and write the gradient over the logits.

    A row's logits are read twice, and its gradient is written over them. A label that is no class
    makes its loss NaN.
    """
    require_float(logits)
    T, V = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("each row of logits has to be contiguous")
    # fp32 whatever the logits: losses are summed over many tokens.
    losses = torch.empty(T, dtype=torch.float32, device=logits.device)
    penalties = torch.empty_like(losses)
    block = min(_WIDEST, max(16, triton.next_power_of_2(V)))
    if T:
        _replace_by_gradient[(T,)](
            logits,
            labels.contiguous(),
            losses,
            penalties,
            logits.stride(0),
            V,
            z_loss,
            IGNORED=IGNORED,
            BLOCK=block,
            num_warps=max(4, block // 512),
        )
    return losses, penalties


@triton.jit
def _replace_by_gradient(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    penalties_ptr,
    stride,
    V,
    z_loss,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    dtype = logits_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    # Whole programs branch alike: a row is one program.
    if label != IGNORED:
        # Memory outside of the row must not be read, and a wrong label must not go unseen.
        is_class = (label >= 0) & (label < V)
        chosen = tl.load(logits_ptr + label, mask=is_class, other=float("nan")).to(tl.float32)
        # Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), a sum for each lane. The
        # lowest finite number, since -inf - -inf is no number.
        largest = -3.4028234663852886e38
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, V, BLOCK):
            mask = first + columns < V
            x = tl.load(logits_ptr + first + columns, mask=mask, other=float("-inf"))
            x = x.to(tl.float32)
            # What is summed so far is rescaled whenever a larger logit appears.
            before = largest
            largest = tl.maximum(largest, tl.max(x, axis=0))
            sums = sums * tl.exp(before - largest) + tl.exp(x - largest)
        total = tl.sum(sums, axis=0)
        log_partition = largest + tl.log(total)
        tl.store(losses_ptr + row, log_partition - chosen)
        tl.store(penalties_ptr + row, z_loss * log_partition * log_partition)
        scale = (1 + 2 * z_loss * log_partition) / total
        tl.debug_barrier()  # all threads have read before any overwrites
        for first in range(0, V, BLOCK):
            mask = first + columns < V
            x = tl.load(logits_ptr + first + columns, mask=mask, other=float("-inf"))
            gradient = tl.exp(x.to(tl.float32) - largest) * scale
            # softmax minus one at the label.
            gradient -= tl.where(first + columns == label, 1.0, 0.0)
            tl.store(logits_ptr + first + columns, gradient.to(dtype), mask=mask)
    else:
        # The memory is uninitialised, and the gradient must be 0 where the logits were.
        tl.store(losses_ptr + row, 0.0)
        tl.store(penalties_ptr + row, 0.0)
        for first in range(0, V, BLOCK):
            mask = first + columns < V
            tl.store(logits_ptr + first + columns, tl.zeros((BLOCK,), dtype=dtype), mask=mask)
