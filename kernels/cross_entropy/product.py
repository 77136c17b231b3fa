"""A sum of products that is wider than their operands, added up while they are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operators import operator
from ..torch_private import graph_is_kept


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a @ b, summed over chunks in fp32 at least.

    Args:
        total: [N, K], what this function returned for earlier chunks, changed in place; None: there
            is none.
        a: [N, M].
        b: [M, K], of the dtype of a.
    """
    is_first = total is None
    if total is None:
        wide = torch.promote_types(a.dtype, torch.float32)
        total = a.new_empty(a.shape[0], b.shape[1], dtype=wide)
    if total.dtype == a.dtype:
        return torch.mm(a, b, out=total) if is_first else total.addmm_(a, b)
    if a.is_cpu:
        # Plain operations: the first call of one of ours imports the compiler (torch 2.13), which
        # takes a second and 100 MiB.
        return total.copy_(a @ b) if is_first else total.add_(a @ b)
    _write_wide_product(total, a, b, is_first)
    return total


def scale_gradient(total: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a saved gradient times that of a scalar loss, cast to a weight's dtype.

    The saved one is overwritten, unless `retain_graph` announces another backward pass: a copy in
    fp32 would be as large as the output layer.
    """
    # The compiler decides by itself what it overwrites, and cannot trace the question.
    keeps = torch.compiler.is_compiling() or graph_is_kept()
    return (total * grad if keeps else total.mul_(grad)).to(dtype)


# An operation of ours, because tracing (torch 2.13) does not know addmm with an out_dtype.
@operator("write_wide_product", mutates_args=("total",), fake=lambda *_: None)
def _write_wide_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    if a.is_cuda:
        # cuBLAS adds its fp32 sums to the total: no product in 16 bits is written and read again,
        # and nothing is rounded in between. Torch takes such a total since 2.10.
        beta = 0 if is_first else 1
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    elif is_first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)
