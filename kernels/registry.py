"""The implementations of each operation by name: ours, and those of plugins.

Plain Python: a recipe that names an implementation is checked without torch and without Triton, and
an implementation is imported when a run first chooses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""whether Triton's interpreter runs kernels, on any device, to find faults in them"""


@cache
def load(target: str) -> Any:
    """Import a "module:attribute" and return the attribute."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def without_triton(device_type: str) -> str:
    """Return why Triton's kernels cannot run on a device type; empty where they can."""
    if device_type != "cuda" and not INTERPRETED:
        return f"Triton's kernels run on a GPU, and this is a {device_type.upper()}"
    return "" if find_spec("triton") else "the package triton is not installed"


def without_gpu(device_type: str) -> str:
    """Return why flash attention cannot run on a device type; empty where it can."""
    return "" if device_type == "cuda" else f"it runs on a GPU, and this is a {device_type.upper()}"


def runs_anywhere(_: str) -> str:
    """Return no obstacle, whatever the device type."""
    return ""


@dataclass(frozen=True)
class Implementation:
    """One implementation of an operation.

    Attributes:
        target: "module:attribute", the function that computes the operation.
        obstacle: maps a device type, "cpu" or "cuda", to why the implementation cannot run there,
            or to an empty text where it can.
    """

    target: str
    obstacle: Callable[[str], str] = runs_anywhere


class Implementations:
    """The implementations of one operation by name.

    An installed package offers one by an entry point of group `trainer.kernel`, whose name is
    OPERATION.NAME and whose value is the "module:attribute".

    Args:
        operation: a key of a recipe's `[kernels]` table.
        ours: the implementations of this package by name.
    """

    def __init__(self, operation: str, ours: Mapping[str, Implementation]) -> None:
        self.operation = operation
        self._known = dict(ours)

    def register(
        self, name: str, target: str, obstacle: Callable[[str], str] = runs_anywhere
    ) -> None:
        """Add an implementation; the arguments are those of `Implementation`.

        Raises:
            ValueError: another implementation has the name.
        """
        known = self._known.setdefault(name, Implementation(target, obstacle))
        if known.target != target:
            raise ValueError(
                f"kernel {self.operation} {name!r} is registered twice: {known.target} and {target}"
            )

    def __getitem__(self, name: str) -> Implementation:
        return self._known.get(name) or self._installed()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._installed()

    def __iter__(self) -> Iterator[str]:
        # Ours first, in the order of the table: it is the order in messages.
        return iter({**self._known, **self._installed()})

    def _installed(self) -> dict[str, Implementation]:
        prefix = f"{self.operation}."
        return {
            entry.name.removeprefix(prefix): Implementation(entry.value)
            for entry in entry_points(group="trainer.kernel")
            if entry.name.startswith(prefix)
        }


_OURS = {
    "attention": {
        "matmul": "attention.reference:matmul",
        "sdpa": "attention.reference:sdpa",
    },
    "ragged_attention": {
        "blocks": "attention.ragged:attend_in_blocks",
        "varlen": "attention.ragged:attend_varlen",
    },
    "rms_norm": {"torch": "rms_norm.reference:rms_norm", "triton": "rms_norm.op:rms_norm"},
    "rotary": {"torch": "rotary.reference:rotary", "triton": "rotary.op:rotary"},
    "swiglu": {"torch": "swiglu.reference:swiglu", "triton": "swiglu.op:swiglu"},
    "linear_cross_entropy": {
        "torch": "cross_entropy.reference:linear_cross_entropy",
        "compiled": "cross_entropy.op:compiled_linear_cross_entropy",
        "triton": "cross_entropy.op:linear_cross_entropy",
    },
    "grouped_gemm": {
        "torch": "grouped_gemm.op:library_mm",
        "triton": "grouped_gemm.op:grouped_mm",
    },
    "permute": {
        "torch": "permute.permutation:TORCH",
        "triton": "permute.permutation:TRITON",
    },
    "moe": {"torch": "moe.layer:TORCH", "fused": "moe.layer:fused_experts"},
}

_OBSTACLES = {"triton": without_triton, "fused": without_triton, "varlen": without_gpu}

kernels: Mapping[str, Implementations] = {
    operation: Implementations(
        operation,
        {
            name: Implementation(f"{__package__}.{target}", _OBSTACLES.get(name, runs_anywhere))
            for name, target in targets.items()
        },
    )
    for operation, targets in _OURS.items()
}
"""operation -> its implementations"""
