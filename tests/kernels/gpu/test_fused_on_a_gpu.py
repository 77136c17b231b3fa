"""Operations on rows, quantisation and fused products for real: `make test-gpu`."""

import pytest
import torch

from tests.kernels.guarded import TOLERANCE, group_sizes, relative_error
from tests.kernels.test_grouped_gemm_fp8 import check_product, ends, operands
from tests.kernels.test_moe import check_pieces, check_up, choices, layer, run
from tests.kernels.test_quantize import LAYOUTS, check_act, check_dequant, check_weight
from tests.kernels.test_row_kernels import check_activation, check_loss, check_norm, check_rotation
from trainer.kernels.cvmm.op import cvmm, cvmm_prepare_sel2
from trainer.kernels.grouped_gemm_fp8 import op as fp8
from trainer.kernels.quantize import op as quantize
from trainer.kernels.quantize.reference import dequant, dequant_act

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield
    torch.cuda.empty_cache()


@dtypes
@pytest.mark.parametrize(("T", "D"), [(1, 5), (130, 128), (1000, 4096), (33, 8190)])
def test_operations_on_rows(T, D, dtype):
    check_norm(T, D, dtype, dtype)
    for is_weighted in (False, True):
        check_activation(T, D, dtype, is_weighted)
    check_loss(max(T, 6), D, dtype, 0.01)


@dtypes
@pytest.mark.parametrize(("H", "K"), [(1, 2), (5, 64), (33, 128)])
def test_rotation(H, K, dtype):
    check_rotation(H, K, dtype)
    check_rotation(H, K, dtype, of_each_row=True)
    check_rotation(H, K, dtype, is_view=True)


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pow2", [False, True])
def test_quantised_numbers_have_the_references_bits(dtype, pow2, layout):
    check_act(1000, 1024, dtype, pow2, layout)
    check_weight(3, 300, 520, dtype, pow2, layout)
    check_dequant(300, 520, dtype)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", group_sizes(128), ids=str)
def test_fp8_products(sizes, out_dtype):
    check_product(sizes, 70, 384, 512, None, None, out_dtype)


@dtypes
@pytest.mark.parametrize(("I", "K"), [(192, 256), (200, 328), (33, 65)])
@pytest.mark.parametrize("sizes", group_sizes(128), ids=str)
def test_fused_products(sizes, I, K, dtype):  # noqa: E741
    check_up(sizes, I, K, dtype, None, None, True)
    check_pieces(dtype, I)


def test_results_repeat_bit_for_bit():
    from trainer.kernels.rms_norm import triton as norm

    x, weight = torch.randn(20000, 1024).bfloat16(), torch.rand(1024)
    _, _, inverse = norm.forward(x, None, weight, 1e-5)
    first, again = (norm.backward(x, None, x, weight, inverse)[1] for _ in range(2))
    assert torch.equal(first, again)
    arguments = *operands(1000, 256, 512, 3), ends([400, 0, 550])
    assert torch.equal(fp8.grouped_mm_fp8(*arguments), fp8.grouped_mm_fp8(*arguments))


def test_a_layer_of_experts_is_captured_in_a_graph():
    sel = choices([100, 0, 300, 112])
    inputs = [each.detach() for each in layer(sel, 4, 128, 256, torch.bfloat16)]
    expected = run(*inputs, sel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*inputs, sel)
    graph.replay()
    assert torch.equal(found, expected)


def test_a_layer_of_experts_is_compiled_in_one_graph():
    sel = choices([100, 0, 300, 112])
    inputs = layer(sel, 4, 128, 256, torch.bfloat16)
    found = []
    for function in (run, torch.compile(run, fullgraph=True)):
        out = function(*inputs, sel)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for compiled, eager in zip(*found, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE[torch.bfloat16]


def test_fp8_products_are_compiled_in_one_graph():
    sel = choices([100, 0, 300, 112])
    x, keys = torch.randn(256, 256).bfloat16(), torch.randn(4, 256, 128).bfloat16()
    inputs = [x.requires_grad_(), keys.requires_grad_()]

    def product(x, keys):
        return cvmm(x, cvmm_prepare_sel2(sel), keys, act="fp8")

    found = []
    for function in (product, torch.compile(product, fullgraph=True)):
        out = function(*inputs)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), inputs)))
    for compiled, eager in zip(*found, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE[torch.bfloat16]


@pytest.fixture
def a_large_gpu():
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")


LAST = 300
ROWS = 2**20 + 100
WIDE = 2176  # so many numbers a row make more than 2^31


@pytest.mark.usefixtures("a_large_gpu")
def test_a_row_beyond_two_to_the_31_is_its_own():
    from trainer.kernels.rms_norm import triton as norm

    rows, width = 2**31 // 4096 + 3, 4096
    x = torch.zeros(rows, width, dtype=torch.bfloat16)
    x[-1] = 2.0
    out, _, inverse = norm.forward(x, None, torch.ones(width), 0.0)
    assert (out[-1] == 1).all()
    assert inverse[-1].item() == pytest.approx(0.5)


@pytest.mark.usefixtures("a_large_gpu")
def test_activations_beyond_two_to_the_31():
    from trainer.kernels.swiglu import triton

    gate, up = (torch.randn(ROWS, WIDE, dtype=torch.bfloat16) for _ in range(2))
    out = triton.forward(gate, up, None)
    last = gate[-LAST:].double(), up[-LAST:].double()
    exact = last[0] * last[0].sigmoid() * last[1]
    assert relative_error(out[-LAST:], exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures("a_large_gpu")
def test_a_loss_of_logits_beyond_two_to_the_31():
    from trainer.kernels.cross_entropy import triton

    rows, classes = 2**31 // 128256 + 10, 128256
    logits = torch.randn(rows, classes, dtype=torch.bfloat16)
    labels = torch.randint(0, classes, (rows,))
    exact = logits[-1].double().softmax(-1)
    exact[labels[-1]] -= 1
    triton.replace_by_gradient(logits, labels, 0.0)
    assert relative_error(logits[-1], exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures("a_large_gpu")
def test_fp8_rows_beyond_two_to_the_31():
    x, w = torch.randn(ROWS, WIDE, dtype=torch.bfloat16), torch.randn(1, 128, WIDE).bfloat16()
    (x8, x_scale), (w8, w_scale) = quantize.quant_act(x), quantize.quant_weight(w)
    y = fp8.grouped_mm_fp8(x8, x_scale, w8, w_scale, ends([ROWS]))
    restored = dequant_act(x8[-LAST:], x_scale[:, -LAST:], torch.float64)
    assert relative_error(restored, x[-LAST:].double()) < 0.04
    exact = restored @ dequant(w8[0], w_scale[0], torch.float64).T
    assert relative_error(y[-LAST:], exact) < TOLERANCE[torch.bfloat16]
    x8, x_scale = quantize.quant_act(torch.randn(ROWS, 128).bfloat16())
    w8, w_scale = quantize.quant_weight(torch.randn(1, WIDE, 128).bfloat16())
    y = fp8.grouped_mm_fp8(x8, x_scale, w8, w_scale, ends([ROWS]))
    exact = dequant_act(x8[-LAST:], x_scale[:, -LAST:], torch.float64)
    exact = exact @ dequant(w8[0], w_scale[0], torch.float64).T
    assert relative_error(y[-LAST:], exact) < TOLERANCE[torch.bfloat16]


@pytest.mark.usefixtures("a_large_gpu")
def test_fused_products_beyond_two_to_the_31():
    from trainer.kernels.moe import triton

    inner = WIDE // 2
    x, w13 = torch.randn(1000, 64).bfloat16(), torch.randn(1, 2 * inner, 64).bfloat16() / 8
    row_token = torch.randint(0, 1000, (2 * ROWS,), dtype=torch.int32)
    h, gate_up = triton.moe_up_swiglu(x, w13, row_token, ends([2 * ROWS]))
    exact = x[row_token[-LAST:].long()].double() @ w13[0].double().T
    assert relative_error(gate_up[-LAST:], exact) < TOLERANCE[torch.bfloat16]
    gate, up = exact.chunk(2, dim=-1)
    assert relative_error(h[-LAST:], gate * gate.sigmoid() * up) < TOLERANCE[torch.bfloat16]
