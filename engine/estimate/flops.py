"""Floating-point operations of matrix products and attention; the rest is not worth counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_aten = torch.ops.aten
_FACTORS = {
    _aten.mm: 0,
    _aten.bmm: 0,
    _aten.addmm: 1,
    _aten.addmm_: 1,
    _aten.baddbmm: 1,
    _aten.baddbmm_: 1,
    _aten._scaled_mm: 0,
    _aten._grouped_mm: 0,
}
"""operation -> which argument the first factor is; the second one follows"""
_OURS = ("trainer::grouped_mm", "trainer::grouped_dw")
"""operations of our own whose first two arguments are the factors"""
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")


class Work(NamedTuple):
    """Floating-point operations.

    Attributes:
        model: what the mathematics asks for.
        again: what was computed before, and was not kept.
    """

    model: int = 0
    again: int = 0


def work_of(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Work:
    """Return the work of one operation: two for each product that is summed."""
    packet = operation.overloadpacket
    if packet in _FACTORS or operation.name().startswith(_OURS):
        first = _FACTORS.get(packet, 0)
        return _in_recomputation(2 * args[first].numel() * out.shape[-1])
    if operation._opname.startswith(_ATTENTION):
        names = (argument.name for argument in operation._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        scores, values = _attention(given)
        if operation._opname.endswith(("backward", "backward_for_cpu")):
            # It makes the scores anew, which no fused kernel keeps.
            return Work(2 * (scores + values), scores)
        return _in_recomputation(scores + values)
    return Work()


def _in_recomputation(count: int) -> Work:
    # What runs again saves tensors for gradients; what computes gradients does not.
    in_backward = torch._C._current_graph_task_id() != -1
    saves = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return Work(again=count) if in_backward and saves else Work(model=count)


def _attention(given: dict[str, Any]) -> tuple[int, int]:
    """Return the work of scores and of weighted values.

    Causal attention counts at half (PaLM, arXiv:2204.02311, appendix B), attention with a mask in
    full: fused kernels compute all of it.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    batch, heads, length, width = query.shape
    pairs = batch * heads * length * key.shape[-2]
    if given.get("is_causal"):
        pairs //= 2
    return 2 * pairs * width, 2 * pairs * int(value.shape[-1])
