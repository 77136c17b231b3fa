"""Which operations' results selective recomputation can keep. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping

_GATHERS = ("_c10d_functional.all_gather_into_tensor.default",)
_SUMS = (
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_reduce.default",
)

GROUPS: Mapping[str, tuple[str, ...]] = {
    "mm": (
        "aten.mm.default",
        "aten.addmm.default",
        "aten._scaled_mm.default",
        "aten._grouped_mm.default",
        "trainer.grouped_mm_fp8.default",
    ),
    "bmm": ("aten.bmm.default", "aten.baddbmm.default"),
    "attention": (
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "higher_order.flex_attention",
    ),
    "norm": ("aten._fused_rms_norm.default", "aten.rsqrt.default"),
    "all_gather": _GATHERS,
    "reduce_scatter": _SUMS,
    "collectives": (
        *_GATHERS,
        *_SUMS,
        "_c10d_functional.all_to_all_single.default",
        "_c10d_functional.wait_tensor.default",
    ),
}
"""Word of `memory.recompute_keep` -> operations."""

HALF = "half_mm"
"""Another word: every second operation of "mm", the first of a block among them."""
WORDS = (*GROUPS, HALF)

FULL_NAME = re.compile(r"\w+\.\w+(\.\w+)?")
"""Another operation: namespace, name and overload, as torch.ops has them."""


def operation_names(words: list[str]) -> list[str]:
    """Return the full names of the operations that words of `recompute_keep` stand for."""
    return [name for word in words if word != HALF for name in GROUPS.get(word, (word,))]
