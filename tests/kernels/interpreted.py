"""Run Triton kernels on CPU tensors, in Triton's interpreter, with arithmetic that can be trusted.

    error = interpreted(check_product, 33, "bfloat16")   # a top-level function of a test module

The stock interpreter keeps bfloat16 as bit patterns and calculates with the patterns, truncates
where hardware rounds to nearest even, loses carries on the way to fp8, and overflows in the
addresses of ragged descriptors. `repair` replaces these by torch's conversions, float32
arithmetic and 64-bit addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.kernels.child import Child

# numpy has no bfloat16 and no fp8: the interpreter holds them as unsigned integers of their width.
RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LARGEST_FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def interpreted(function: Callable[..., Any], *args: Any) -> Any:
    """Return what `function(*args)` returns where kernels are interpreted.

    Raises:
        AssertionError: it raised there; the text is its traceback.
    """
    return CHILD.call(function, *args)


def repair() -> None:
    """Put right what the interpreter gets wrong, in this process."""
    from triton.runtime import interpreter as stock

    torch.set_num_threads(1)
    right, builder = _Arithmetic(), stock.InterpreterBuilder
    stock._convert_float = right.converting(stock._convert_float)
    stock.TensorDescHandle.materialize_pointers = right.block_pointers
    builder.cast_impl = right.casting(builder.cast_impl)
    builder.create_dot = right.dot
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(builder, name, right.widening(getattr(builder, name)))


class _Arithmetic:
    """What takes the place of the interpreter's own operations."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        self.tl, self.handle = tl, TensorHandle
        self.dtypes = {
            tl.bfloat16: torch.bfloat16,
            tl.float16: torch.float16,
            tl.float32: torch.float32,
            tl.float64: torch.float64,
            tl.float8e4nv: torch.float8_e4m3fn,
            tl.float8e5: torch.float8_e5m2,
        }
        self.patterns = {tl.bfloat16, tl.float8e4nv, tl.float8e5}  # numpy has no such numbers

    def converting(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
            if source in self.dtypes and target in self.dtypes:
                return _convert(data, self.dtypes[source], self.dtypes[target])
            return stock(data, source, target, rounding)

        return convert

    def widened(self, value: Any) -> Any:
        source = value.dtype.scalar
        if source not in self.patterns:
            return value
        data = _convert(value.data, self.dtypes[source], torch.float32).view(np.float32)
        return self.handle(data, self.tl.float32)

    def narrowed(self, value: Any, target: Any) -> Any:
        if target not in self.patterns:
            return value
        if value.data.dtype == np.bool_:
            return self.handle(value.data, self.tl.int1)
        data = value.data.astype(np.float32)
        return self.handle(_convert(data, torch.float32, self.dtypes[target]), target)

    def widening(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def operation(builder: Any, *operands: Any) -> Any:
            values = [operand for operand in operands if isinstance(operand, self.handle)]
            target = values[-1].dtype.scalar
            wide = [self.widened(o) if isinstance(o, self.handle) else o for o in operands]
            return self.narrowed(stock(builder, *wide), target)

        return operation

    def casting(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def cast(builder: Any, value: Any, target: Any) -> Any:
            wide = self.widened(value)
            if target.scalar in self.patterns:
                return self.narrowed(wide, target.scalar)
            return stock(builder, wide, target)

        return cast

    @property
    def dot(self) -> Callable[..., Any]:
        def dot(builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
            dtype = total.data.dtype
            left, right = self.widened(a).data, self.widened(b).data
            product = np.matmul(left.astype(dtype), right.astype(dtype))
            return self.handle(product + total.data, total.dtype.scalar)

        return dot

    @property
    def block_pointers(self) -> Callable[..., Any]:
        """A descriptor's method that calculates addresses in 64 bits, which wrap around."""

        def materialize_pointers(block: Any, offsets: list[Any]) -> Any:
            size = block.base.dtype.element_ty.primitive_bitwidth // 8
            innermost = int(np.asarray(offsets[-1].data).item())
            assert innermost * size % 16 == 0, "a block must start at a multiple of 16 bytes"
            address = np.broadcast_to(block.base.data, block.block_shape)
            inside = np.ones(block.block_shape, dtype=bool)
            for dim, length in enumerate(block.block_shape):
                shape = [1] * len(block.block_shape)
                shape[dim] = length
                first = np.asarray(offsets[dim].data).astype(np.int64)
                index = (first + np.arange(length)).reshape(shape)
                stride = np.asarray(block.strides[dim].data).astype(np.int64)
                with np.errstate(over="ignore"):
                    address = address + (index * stride * size).astype(np.uint64)
                inside = inside & (index >= 0) & (index < np.asarray(block.shape[dim].data))
            dtype = block.base.dtype.scalar
            return self.handle(address, dtype), self.handle(inside, self.tl.int1)

        return materialize_pointers


def _convert(data: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Return the target's bits, rounded to nearest even; fp8 saturates as hardware does."""
    array = np.ascontiguousarray(data)
    raw = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    values = raw.view(source).to(torch.float64)  # holds every float of the others
    if target in LARGEST_FP8:
        values = values.clamp(-LARGEST_FP8[target], LARGEST_FP8[target])
    bits = values.to(target).view(torch.uint8).numpy()
    return bits.view(RAW[target.itemsize]).reshape(np.shape(data))


CHILD = Child(
    {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, repair
)
