"""Small kernels that test the tests' own tools."""

import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))


@triton.jit
def copy(source_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(source_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def arithmetic(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, a + b)
    tl.store(out_ptr + SIZE + at, a * b)
    tl.store(out_ptr + 2 * SIZE + at, a - b)
    tl.store(out_ptr + 3 * SIZE + at, tl.where(a < b, a, b))
    tl.store(out_ptr + 4 * SIZE + at, -a)
    tl.store(out_ptr + 5 * SIZE + at, at.to(tl.bfloat16))


@triton.jit
def fill_ragged(out, start, size):
    big: tl.constexpr = 0x40000000
    for row in range(0, size, 4):
        values = tl.full((1, 1, 4, 16), 7.0, tl.float32)
        out.store([big, start + size, big - size + row, 0], values)
