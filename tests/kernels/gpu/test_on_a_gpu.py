"""The kernels for real, with their defaults: `make test-gpu` where there is a GPU.

What the interpreter cannot show: that results repeat bit for bit, that nothing waits for the
device, that a graph can be captured, and that offsets hold more than 2^31 elements.
"""

import pytest
import torch

from tests.kernels.guarded import TOLERANCE, group_sizes, guards, relative_error
from tests.kernels.test_grouped_gemm import (
    dw_error,
    exact_dw,
    exact_mm,
    inputs,
    mm_error,
)
from tests.kernels.test_permute import errors as permute_errors
from tests.kernels.test_routing import listed
from trainer.kernels.grouped_gemm import op
from trainer.kernels.permute import op as permute_op
from trainer.kernels.routing import op as routing_op
from trainer.kernels.routing import reference as routing_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MORE_THAN_32_BITS = 2**31
# Tensor cores cut off what they add, where other units round.
WIDE_TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans_w", [True, False])
@pytest.mark.parametrize("shape", [(384, 512), (200, 328), (33, 65)], ids=str)
@pytest.mark.parametrize("sizes", group_sizes(128), ids=str)
def test_products(sizes, shape, trans_w, dtype):
    from trainer.kernels.grouped_gemm import triton, triton_dw

    error = mm_error(triton.grouped_mm, sizes, *shape, dtype, trans_w, 70)
    assert error < TOLERANCE[dtype]
    wide = mm_error(triton.grouped_mm, sizes, *shape, dtype, trans_w, 70, torch.float32)
    assert wide < WIDE_TOLERANCE
    for out_dtype, add in ((dtype, False), (torch.float32, True)):
        error = dw_error(triton_dw, sizes, *shape, dtype, out_dtype, add)
        assert error < max(TOLERANCE[out_dtype], WIDE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 8, 1030)])
@pytest.mark.parametrize("weighted", [True, False])
def test_permutations(shape, dtype, weighted):
    from trainer.kernels.permute import triton

    *rounded, dots = permute_errors(triton, shape, dtype, weighted)
    assert all(error < TOLERANCE[dtype] for error in rounded)
    assert dots < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("tokens", "num_experts"), [(0, 3), (1, 1), (5000, 60), (70000, 256)])
def test_plans(tokens, num_experts):
    torch.manual_seed(0)
    sel = torch.randint(0, num_experts, (tokens, 8))
    with guards():
        plan = routing_op.routing_plan(sel, num_experts)
    assert listed(plan) == listed(routing_reference.routing_plan(sel, num_experts))


@pytest.mark.parametrize("experts", [1, 8])
@pytest.mark.parametrize("pad_empty", [True, False])
def test_rows_of_ranks_are_grouped_by_expert(experts, pad_empty):
    from trainer.kernels.routing import triton

    torch.manual_seed(0)
    tokens = torch.randint(0, 300, (4 * experts,), dtype=torch.int32)
    for max_len in (0, 700, 20000):
        case = (tokens, experts, 4, max_len, 16)
        found = triton.generate_permute_indices(*case, pad_empty=pad_empty)
        expected = routing_reference.generate_permute_indices(*case, pad_empty=pad_empty)
        assert listed(found) == listed(expected)


def test_gradients_are_those_of_the_reference():
    x, w, dy, offs = inputs([100, 0, 300, 29], 256, 384, torch.bfloat16)
    x.requires_grad_()
    w.requires_grad_()
    grads = torch.autograd.grad(op.grouped_mm(x, w, offs), (x, w), dy)
    exact = exact_mm(dy, w.detach(), offs, False), exact_dw(dy, x.detach(), offs)
    for grad, right in zip(grads, exact, strict=True):
        assert relative_error(grad, right) < TOLERANCE[torch.bfloat16]


def layer(x, sel, weight, w):
    """Return a layer of experts of one product each."""
    plan = routing_op.routing_plan(sel, len(w))
    rows = permute_op.permute(x, plan.slot)
    return permute_op.unpermute(op.grouped_mm(rows, w, plan.offs), plan.slot, weight)


def layer_inputs():
    torch.manual_seed(0)
    x, w = torch.randn(1000, 256).bfloat16(), torch.randn(8, 512, 256).bfloat16()
    return x, torch.randint(0, 8, (1000, 2)), torch.rand(1000, 2), w


def test_results_repeat_bit_for_bit():
    x, sel, weight, w = layer_inputs()
    for value in (x, weight, w):
        value.requires_grad_()

    def everything():
        y = layer(x, sel, weight, w)
        return y, *torch.autograd.grad(y.float().square().sum(), (x, weight, w))

    first = everything()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, everything(), strict=True))


def test_nothing_waits_for_the_device():
    given = layer_inputs()
    layer(*given)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_follows_other_choices():
    x, sel, weight, w = layer_inputs()
    layer(x, sel, weight, w)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, sel, weight, w)
    for hot in (0, 7):
        sel.copy_(torch.randint(0, 8, sel.shape)).clamp_(max=hot)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer(x, sel, weight, w))


@pytest.mark.parametrize(("n", "k"), [(64, 2112), (2112, 64)], ids=["x", "y"])
def test_more_than_2_to_the_31_elements_in_rows(n, k):
    rows = 2**20 + 100
    assert rows * max(n, k) > MORE_THAN_32_BITS
    x, w = torch.randn(rows, k, dtype=torch.bfloat16), torch.randn(1, n, k, dtype=torch.bfloat16)
    y = op.grouped_mm(x, w, torch.tensor([rows], dtype=torch.int32))
    last = x[-300:].double() @ w[0].double().T
    assert relative_error(y[-300:], last) < TOLERANCE[torch.bfloat16]


def test_more_than_2_to_the_31_elements_in_weights():
    experts, n, k = 33, 8192, 8192
    assert experts * n * k > MORE_THAN_32_BITS
    x, dy = torch.randn(33, k, dtype=torch.bfloat16), torch.randn(33, n, dtype=torch.bfloat16)
    w = torch.randn(experts, n, k, dtype=torch.bfloat16)
    offs = torch.arange(1, 34, dtype=torch.int32)
    y = op.grouped_mm(x, w, offs)
    last = x[-1:].double() @ w[-1].double().T
    assert relative_error(y[-1:], last) < TOLERANCE[torch.bfloat16]
    del w
    dw = op.grouped_dw(dy, x, offs)
    last = torch.outer(dy[-1].double(), x[-1].double())
    assert relative_error(dw[-1], last) < WIDE_TOLERANCE


def test_more_than_2_to_the_31_elements_to_permute():
    tokens, width = 2**18 + 1, 1056
    assert 8 * tokens * width > MORE_THAN_32_BITS
    x = torch.randn(tokens, width, dtype=torch.bfloat16)
    slot = routing_op.routing_plan(torch.randint(0, 64, (tokens, 8)), 64).slot
    rows = permute_op.permute(x, slot)
    for token in (0, tokens - 1):
        assert torch.equal(rows[slot[token].long()], x[token].expand(8, -1))
    assert torch.equal(permute_op.unpermute(rows, slot), 8 * x)
