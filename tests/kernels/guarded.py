"""What every test of a kernel needs: memory that shows every wrong write, and sizes that hurt.

x = surrounded(torch.randn(33, 40))          # NaN lies before and after it
with guards():                               # and around and in whatever is allocated here
    y = grouped_gemm(x, w, offs)
assert relative_error(y, exact) < TOLERANCE[y.dtype]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
"""Relative Frobenius error against float64."""

GUARD_ROWS = 32
# As a float of any width this is NaN; as an integer it is no index, and not the -1 of padding.
FLOAT_BYTE, INTEGER_BYTE = 0xFF, 0xA5
ALLOCATE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Return |value - exact| / |exact| in the Frobenius norm; NaN where anything is NaN."""
    assert value.shape == exact.shape, (value.shape, exact.shape)
    difference, size = (value.double() - exact.double()).norm(), exact.double().norm()
    return float(difference / size) if size else float(difference)


def surrounded(value: Tensor) -> Tensor:
    """Return a copy that lies between NaN: what reads beside it shows in the result."""
    copy, _ = _between_guards(value.shape, value.dtype, value.device)
    copy.copy_(value)
    return copy


@contextmanager
def guards() -> Iterator[None]:
    """Fill what is allocated with NaN and put guard rows around it.

    Raises:
        AssertionError: a guard row was written to.
    """
    mode = _Guards()
    with mode:
        yield
    for memory, before, after in mode.allocated:
        for part in (memory[:before], memory[after:]):
            assert (part == part[0]).all(), "written outside of a tensor"


class _Guards(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[Tensor, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in ALLOCATE or not out.is_contiguous():
            return out
        value, place = _between_guards(out.shape, out.dtype, out.device)
        self.allocated.append(place)
        return value


def _between_guards(
    shape: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, tuple[Tensor, int, int]]:
    """Return a tensor inside filled memory, and that memory with where the tensor lies."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    row = shape[-1] * dtype.itemsize if len(shape) else dtype.itemsize
    guard = -(-max(GUARD_ROWS * row, 1024) // 256) * 256  # TMA needs aligned tensors
    byte = FLOAT_BYTE if dtype.is_floating_point else INTEGER_BYTE
    memory = torch.full((2 * guard + size + 256,), byte, dtype=torch.uint8, device=device)
    before = guard + -(memory.data_ptr() + guard) % 256
    value = memory[before : before + size].view(dtype).view(shape)
    return value, (memory, before, before + size)


def group_sizes(block: int, groups: int = 4) -> list[list[int]]:
    """Return rows a group as routing makes them, and as it can at worst.

    Args:
        block: rows a tile: sizes around it are where tiles end.
        groups: how many groups.
    """
    some = [0, 1, block - 1, block, block + 1, 2 * block + 3]
    mixed = [some[(3 * group + 1) % len(some)] for group in range(groups)]
    return [
        mixed,
        [some[group % len(some)] for group in range(groups)],
        [block] * groups,
        [0] * (groups - 1) + [2 * block + 1],  # one hot expert
        [1] + [0] * (groups - 1),
        [0] * groups,
    ]
