"""Conditional vector-matrix products (Csordas et al. 2023, arXiv:2310.10837, section 5).

The names and the meaning are those of the paper's code. Rows are sorted by the matrix that they
selected, multiplied a group at a time and put back, by operations that have gradients of any
order (in fp8, of the first); all sums have a fixed order, the gradient of the matrices included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..grouped_gemm.op import grouped_mm
from ..grouped_gemm_fp8.op import grouped_linear_fp8
from ..permute.op import permute, unpermute
from ..quantize.reference import BLOCK

Activations = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class CVMMSel:
    """Which matrices rows selected, and where the rows lie once they are sorted by them."""

    raw_sel: Tensor
    """[...] or [..., A]: the selection."""
    sel: Tensor
    """[T * A]: the selection, sorted."""
    slot: Tensor
    """int32 [T, A]: the place of each in the sorted one; A = 1 for one selection a row."""
    reduction_weight: Tensor | None = None
    """[..., A]: weights of the sum over the A products of a row; None: they are not summed."""


def cvmm_prepare_sel(sel: Tensor, n_experts: int) -> CVMMSel:
    """Return what `cvmm` needs for one selection a row.

    Args:
        sel: [...] of any integer type, each in [0, n_experts).
        n_experts: for the same signature as the paper's code; `keys` say how many there are.
    """
    del n_experts
    ordered, slot = _sort(sel)
    return CVMMSel(sel, ordered, slot.unsqueeze(1))


def cvmm_prepare_sel2(sel: Tensor, w: Tensor | None = None) -> CVMMSel:
    """Return what `cvmm` needs for several selections a row.

    Args:
        sel: [..., A] of any integer type.
        w: [..., A]; given: the A products of a row are summed with these weights.
    """
    ordered, slot = _sort(sel)
    return CVMMSel(sel, ordered, slot.view(-1, sel.shape[-1]), w)


def cvmm(x: Tensor, sel: Tensor | CVMMSel, keys: Tensor, *, act: Activations = "bf16") -> Tensor:
    """Return x @ keys[sel], row by row.

    Args:
        x: [..., K], a row for all its selections, or [..., A, K], a row for each.
        sel: what `cvmm_prepare_sel` or `cvmm_prepare_sel2` returned; a tensor [...] stands for
            `cvmm_prepare_sel(sel)`.
        keys: [E, K, N].
        act: "bf16" multiplies in the dtype of x. "fp8" quantises rows and keys by blocks, and for
            the gradient of x that of the products; the gradient of keys stays in the dtype of x.

    Returns:
        [..., N] for one selection a row, and where the products of a row are summed;
        otherwise [..., A, N].

    Raises:
        ValueError: act is unknown, or K or N of keys in fp8 is no multiple of 128.
    """
    _check(act, keys)
    if isinstance(sel, Tensor):
        sel = cvmm_prepare_sel(sel, len(keys))
    has_row_each = x.dim() == sel.raw_sel.dim() + 1
    each = sel.slot.view(-1, 1)
    experts = torch.arange(len(keys), dtype=sel.sel.dtype, device=x.device)
    # The ends of runs of equal numbers: no counting, and no wait for the device.
    offs = torch.searchsorted(sel.sel, experts, right=True).int()
    rows = permute(x.reshape(-1, x.shape[-1]), each if has_row_each else sel.slot)
    multiply = grouped_linear_fp8 if act == "fp8" else grouped_mm
    products = multiply(rows, keys, offs, trans_w=False)
    if sel.reduction_weight is None:
        return unpermute(products, each).view(*sel.raw_sel.shape, keys.shape[2])
    weight = sel.reduction_weight.reshape(sel.slot.shape)
    summed = unpermute(products, sel.slot, weight)
    return summed.view(*sel.raw_sel.shape[:-1], keys.shape[2])


def _check(act: str, keys: Tensor) -> None:
    if act not in get_args(Activations):
        raise ValueError(f"act is {act!r}; known: {', '.join(get_args(Activations))}")
    K, N = keys.shape[1:]
    if act == "fp8" and (K % BLOCK or N % BLOCK):
        raise ValueError(
            f"keys of {K} x {N} in fp8: both must be multiples of {BLOCK}; or take act='bf16'"
        )


def _sort(sel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the selection in order, and the place in it of each."""
    # Stable, so that sums over equal selections keep the order of rows.
    ordered, index = sel.flatten().sort(stable=True)
    places = torch.arange(len(index), dtype=torch.int32, device=sel.device)
    return ordered, torch.empty_like(places).scatter_(0, index, places)
