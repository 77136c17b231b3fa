"""Grouped products in fp8: beside float64, interpreted, and compiled."""

import pytest
import torch
from torch.library import opcheck

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled, on_each_triton
from tests.kernels.guarded import TOLERANCE, group_sizes, guards, relative_error, surrounded
from tests.kernels.interpreted import interpreted
from trainer.kernels.grouped_gemm_fp8 import op, reference
from trainer.kernels.quantize.reference import dequant, dequant_act, quant_act, quant_weight


def ends(sizes):
    return torch.tensor(sizes).cumsum(0).int()


def operands(M, N, K, E, seed=0):
    torch.manual_seed(seed)
    x, w = torch.randn(M, K), torch.randn(E, N, K) / K**0.5
    return *quant_act(x), *quant_weight(w)


def exact(x, x_scale, w, w_scale, offs):
    """Return the product of what the fp8 numbers stand for, in float64, a row at a time."""
    wide_x = dequant_act(x, x_scale, torch.float64)
    y = torch.zeros(len(x), w.shape[1], dtype=torch.float64)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        y[start:end] = wide_x[start:end] @ dequant(w[expert], w_scale[expert], torch.float64).T
        start = end
    return y


def test_the_reference_multiplies_what_the_numbers_stand_for():
    offs = ends([3, 0, 9, 1])
    arguments = *operands(15, 128, 256, 4), offs
    y = reference.grouped_mm_fp8(*arguments, out_dtype=torch.float32)
    assert relative_error(y, exact(*arguments)) < 1e-6
    assert y[13:].count_nonzero() == 0


def test_the_operator_keeps_its_promises():
    arguments = *operands(15, 128, 256, 2), ends([3, 11]), torch.bfloat16
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")  # others compare inputs: no fp8
    opcheck(op.grouped_mm_fp8, arguments, test_utils=tests)


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(20, 128, dtype=dtype, requires_grad=True)
    w = (torch.randn(3, 256, 128, dtype=dtype) / 11).requires_grad_()
    return x, w, ends([7, 0, 11]), torch.randn(20, 256, dtype=dtype)


@pytest.mark.parametrize("pow2", [False, True])
def test_a_layer_and_the_gradient_of_its_rows_are_products_of_fp8_numbers(pow2):
    x, w, offs, grad = linear()
    y = op.grouped_linear_fp8(x, w, offs, pow2=pow2)
    forward = *quant_act(x.detach(), pow2=pow2), *quant_weight(w.detach(), pow2=pow2)
    assert relative_error(y.detach(), exact(*forward, offs)) < 1e-6
    y.backward(grad)
    back = *quant_act(grad, pow2=pow2), *quant_weight(w.detach().mT, pow2=pow2)
    assert relative_error(x.grad, exact(*back, offs)) < 1e-6
    assert x.grad[18:].count_nonzero() == 0


def test_the_gradient_of_weights_is_not_quantised():
    x, w, offs, grad = linear()
    op.grouped_linear_fp8(x, w, offs).backward(grad)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        expected = grad[start:end].double().T @ x[start:end].detach().double()
        assert relative_error(w.grad[expert], expected) < 1e-6
        start = end


def test_weights_can_lie_the_other_way():
    x, w, offs, grad = linear()
    found = []
    for weight, trans_w in ((w, True), (w.detach().mT.contiguous().requires_grad_(), False)):
        y = op.grouped_linear_fp8(x, weight, offs, trans_w=trans_w)
        grad_x, grad_w = torch.autograd.grad(y, (x, weight), grad)
        found.append((y, grad_x, grad_w if trans_w else grad_w.mT))
    torch.testing.assert_close(*found)


def test_quantised_gradients_are_close_to_those_of_the_plain_product():
    x, w, offs, grad = linear(torch.bfloat16)
    y = op.grouped_linear_fp8(x, w, offs)
    y.backward(grad)
    doubles = [each.detach().double().requires_grad_() for each in (x, w)]
    rows = zip([0, 7, 7], offs.tolist(), doubles[1], strict=True)
    plain = torch.cat([doubles[0][start:end] @ weight.T for start, end, weight in rows])
    plain.backward(grad[:18].double())
    assert relative_error(y[:18].detach(), plain.detach()) < 0.05
    assert relative_error(x.grad[:18], doubles[0].grad[:18]) < 0.05
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_is_compiled_in_one_graph(dtype):
    x, w, offs, grad = linear(dtype)
    compiled_layer = torch.compile(op.grouped_linear_fp8, fullgraph=True, backend="aot_eager")
    found = []
    for layer in (op.grouped_linear_fp8, compiled_layer):
        y = layer(x, w, offs)
        found.append((y, *torch.autograd.grad(y, (x, w), grad)))
    torch.testing.assert_close(*found)


def test_sizes_that_blocks_do_not_fill_are_refused():
    with pytest.raises(ValueError, match="weights of 100 x 128"):
        op.grouped_linear_fp8(torch.ones(4, 128), torch.ones(2, 100, 128), ends([2, 4]))


def check_product(sizes, tail, N, K, tma, programs, out_dtype):
    from trainer.kernels.grouped_gemm.launch import Tiling
    from trainer.kernels.grouped_gemm_fp8 import triton

    M, offs = sum(sizes) + tail, ends(sizes)
    arguments = [*operands(M, N, K, len(sizes)), offs]
    inside = [surrounded(each) for each in arguments]
    tiling = None if tma is None else Tiling(16, 128, 128, warps=4, stages=2, tma=tma)
    with guards():
        y = triton.grouped_mm_fp8(*inside, out_dtype=out_dtype, tiling=tiling, programs=programs)
    tolerance = TOLERANCE[out_dtype]
    if y.is_cuda:  # tensor cores sum the 128 products of a step in less than fp32
        tolerance = max(tolerance, 2e-3)
    assert relative_error(y, exact(*arguments)) < tolerance
    assert y[sum(sizes) :].count_nonzero() == 0


@needs_triton
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("sizes", group_sizes(16, 3), ids=str)
def test_products(sizes, tma):
    interpreted(check_product, sizes, 2, 128, 256, tma, 3, torch.float32)


@needs_triton
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("programs", "dtype"), [(1, torch.bfloat16), (50, torch.float16)])
def test_any_number_of_programs_shares_the_tiles(programs, dtype, tma):
    interpreted(check_product, [5, 0, 33], 1, 256, 128, tma, programs, dtype)


def launch(tma):
    from trainer.kernels.grouped_gemm_fp8 import triton

    M, N, K, E = 4096, 4096, 7168, 8
    x, w = torch.empty(M, K).to(torch.float8_e4m3fn), torch.empty(E, N, K, dtype=torch.uint8)
    arguments = x, torch.empty(K // 128, M), w.view(torch.float8_e4m3fn)
    scales = torch.empty(E, N // 128, K // 128)
    tiling = triton.HOPPER_TMA if tma else triton.POINTERS
    offs = torch.zeros(E, dtype=torch.int32)
    for rows in (M, M - 1):
        part = x[:rows], torch.empty(K // 128, rows), arguments[2]
        triton.grouped_mm_fp8(*part, scales, offs, tiling=tiling)
    triton.grouped_mm_fp8(*arguments, scales, offs)


@needs_triton
@on_each_triton
@pytest.mark.parametrize("tma", [False, True])
def test_tensor_cores_multiply_fp8_and_nothing_spills(tma, triton):
    found = compiled(launch, tma, triton=triton)
    products = [kernel for kernel in found if kernel.name == "_grouped_mm_fp8"]
    assert [kernel.constants["TMA"] for kernel in products] == ([True] if tma else [False, True])
    for kernel in products:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.instructions["QGMMA"] > 0
        assert not {"HMMA", "QMMA"} & set(kernel.instructions)
        copies = "UTMALDG" if kernel.constants["TMA"] else "LDGSTS"
        assert kernel.instructions[copies] > 0, kernel
