"""Both halves of a mixture of experts against loops over tokens in float64, and compiled."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled, on_each_triton
from tests.kernels.guarded import TOLERANCE, group_sizes, guards, relative_error, surrounded
from tests.kernels.interpreted import interpreted
from trainer.kernels.moe import op, reference
from trainer.kernels.routing.reference import routing_plan


def up_formula(x, w13, sel):
    """Return silu(gate) * up of each token's choices [T, A, I], one after another."""
    rows = []
    for token, choices in zip(x, sel.tolist(), strict=True):
        for expert in choices:
            gate, up = (w13[expert] @ token).chunk(2)
            rows.append(gate / (1 + (-gate).exp()) * up)
    return torch.stack(rows).view(*sel.shape, -1)


def down_formula(h, w2, sel, weight):
    """Return [T, K] from [T, A, I]."""
    out = []
    for token, choices in enumerate(sel.tolist()):
        parts = [weight[token, a] * (w2[expert] @ h[token, a]) for a, expert in enumerate(choices)]
        out.append(torch.stack(parts).sum(0))
    return torch.stack(out)


def choices(sizes, num_choices=2):
    """Return [T, A] so that each expert is chosen as often as said, in mixed order."""
    flat = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    flat = flat[: len(flat) // num_choices * num_choices]
    torch.manual_seed(0)
    return flat[torch.randperm(len(flat))].view(-1, num_choices)


def layer(sel, E, I, K, dtype=torch.float64):  # noqa: E741
    torch.manual_seed(0)
    T, A = sel.shape
    x, weight = torch.randn(T, K), torch.rand(T, A)
    w13, w2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
    return [each.to(dtype).requires_grad_() for each in (x, w13, w2, weight)]


def run(x, w13, w2, weight, sel):
    plan = routing_plan(sel, len(w2))
    return op.moe_down_combine(op.moe_up_swiglu(x, w13, plan), w2, plan, weight)


def test_a_layer_equals_the_formula_for_each_token():
    sel = choices([3, 0, 5, 2])
    inputs = layer(sel, 4, 6, 5)
    x, w13, w2, weight = inputs
    out = run(*inputs, sel)
    expected = down_formula(up_formula(x, w13, sel), w2, sel, weight)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )
    plan = routing_plan(sel, 4)
    h, _ = reference.moe_up_swiglu(x, w13, plan)
    torch.testing.assert_close(reference.moe_down_combine(h, w2, plan, weight), expected)


def test_gradients_equal_finite_differences():
    sel = choices([3, 0, 2, 1])
    assert gradcheck(lambda *inputs: run(*inputs, sel), layer(sel, 4, 3, 2))


def test_gradients_of_the_references_equal_finite_differences():
    sel = choices([3, 0, 2, 1])
    plan = routing_plan(sel, 4)
    x, w13, w2, weight = layer(sel, 4, 3, 2)
    h = torch.randn(sel.numel(), 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, w13: reference.moe_up_swiglu(x, w13, plan), (x, w13))
    down = lambda h, w2, weight: reference.moe_down_combine(h, w2, plan, weight)  # noqa: E731
    # SwiGLU's own backward pass is one of torch's that has no derivative.
    for check in (gradcheck, gradgradcheck):
        assert check(down, (h, w2, weight))


def test_nothing_is_kept_where_no_gradient_is_wanted():
    sel = choices([3, 1])
    x, w13, _, _ = (each.detach() for each in layer(sel, 2, 4, 4))
    plan = routing_plan(sel, 2)
    _, gate_up = op._up_swiglu(x, w13, plan.row_token, plan.offs, plan.slot, False)
    assert gate_up.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_keep_their_promises(dtype):
    sel = choices([3, 0, 5])
    x, w13, _, weight = layer(sel, 3, 8, 8, dtype)
    plan = routing_plan(sel, 3)
    for keeps in (False, True):
        inputs = (x, w13) if keeps else (x.detach(), w13.detach())
        opcheck(op._up_swiglu, (*inputs, plan.row_token, plan.offs, plan.slot, keeps))
    rows, wide = torch.randn(8, 8, dtype=dtype), torch.randn(8, 16, dtype=dtype)
    opcheck(op._swiglu_backward, (rows, wide))
    opcheck(op._scale_by_router_weight, (rows, rows + 1, plan.slot, weight.detach()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_is_compiled_in_one_graph(dtype):
    sel = choices([3, 0, 5])
    inputs, plan = layer(sel, 3, 8, 8, dtype), routing_plan(sel, 3)

    def both(x, w13, w2, weight):
        return op.moe_down_combine(op.moe_up_swiglu(x, w13, plan), w2, plan, weight)

    found = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        out = function(*inputs)
        found.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(*found)


def check_up(sizes, I, K, dtype, tma, programs, save):  # noqa: E741
    from trainer.kernels.grouped_gemm.launch import Tiling
    from trainer.kernels.moe import triton

    sel = choices(sizes)
    x, w13, _, _ = (each.detach() for each in layer(sel, len(sizes), I, K, dtype))
    plan = routing_plan(sel, len(sizes))
    inside = [surrounded(each) for each in (x, w13, plan.row_token, plan.offs)]
    tiling = None if tma is None else Tiling(16, 16, 32, warps=4, stages=2, tma=tma)
    with guards():
        h, gate_up = triton.moe_up_swiglu(
            *inside, save_gate_up=save, tiling=tiling, programs=programs
        )
    if sel.numel():
        exact_h, exact_gate_up = reference.moe_up_swiglu(x.double(), w13.double(), plan)
        assert relative_error(h, exact_h) < TOLERANCE[dtype]
        if save:
            assert relative_error(gate_up, exact_gate_up) < TOLERANCE[dtype]
    assert save or gate_up.numel() == 0


@needs_triton
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", group_sizes(16, 3), ids=str)
def test_gathered_rows_are_multiplied(sizes, dtype, tma):
    interpreted(check_up, sizes, 24, 40, dtype, tma, 3, True)


@needs_triton
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("programs", "save"), [(1, True), (50, False)])
def test_any_number_of_programs_shares_the_tiles(programs, save, tma):
    interpreted(check_up, [5, 0, 33, 2], 48, 64, torch.bfloat16, tma, programs, save)


def check_pieces(dtype, I):  # noqa: E741
    from trainer.kernels.moe import triton

    torch.manual_seed(0)
    sel = choices([5, 0, 33, 2])
    plan = routing_plan(sel, 4)
    rows = sel.numel()
    grad, h = (surrounded(torch.randn(rows, I).to(dtype)) for _ in range(2))
    gate_up = surrounded(torch.randn(rows, 2 * I).to(dtype))
    weight = surrounded(torch.rand(sel.shape).to(dtype))
    with guards():
        weighed = triton.scale_by_router_weight(grad, h, plan.slot, weight)
        wide_grad = triton.swiglu_backward(grad, gate_up)
    exact = reference.scale_by_router_weight(grad.double(), h.double(), plan.slot, weight.double())
    for one, other in zip(weighed, exact, strict=True):
        assert relative_error(one, other) < TOLERANCE[dtype]
    exact_grad = reference.swiglu_backward(grad.double(), gate_up.double())
    assert relative_error(wide_grad, exact_grad) < TOLERANCE[dtype]


@needs_triton
@pytest.mark.parametrize("I", [5, 96, 1100])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pieces_of_the_backward_pass(dtype, I):  # noqa: E741
    interpreted(check_pieces, dtype, I)


def launch(tma, arch_default=False):
    from trainer.kernels.moe import triton

    T, A, K, I, E = 512, 8, 2048, 768, 128  # noqa: E741
    x, w13 = (torch.empty(s, dtype=torch.bfloat16) for s in ((T, K), (E, 2 * I, K)))
    row_token, offs = torch.zeros(T * A, dtype=torch.int32), torch.zeros(E, dtype=torch.int32)
    tiling = triton.HOPPER_TMA if tma else triton.POINTERS
    for save in (False, True):
        triton.moe_up_swiglu(x, w13, row_token, offs, save_gate_up=save, tiling=tiling)
    triton.moe_up_swiglu(x, w13, row_token, offs)
    triton.moe_up_swiglu(x[:-1], w13, row_token[:-1], offs)
    rows, slot = torch.empty(T * A, I, dtype=torch.bfloat16), row_token.view(T, A)
    triton.scale_by_router_weight(rows, rows, slot, torch.empty(T, A))


@pytest.mark.matrix
@needs_triton
@on_each_triton
@pytest.mark.parametrize("tma", [False, True])
def test_tensor_cores_multiply_and_nothing_spills(tma, triton):
    found = compiled(launch, tma, triton=triton)
    ups = [kernel for kernel in found if kernel.name == "_moe_up_swiglu"]
    assert len(ups) == (2 if tma else 3)
    for kernel in found:
        assert kernel.spill_bytes == 0, kernel
    for kernel in ups:
        assert kernel.instructions["HGMMA"] > 0
        assert kernel.instructions["LDGSTS"] > 0  # rows are gathered without registers
        assert "HMMA" not in kernel.instructions
        assert ("UTMALDG" in kernel.instructions) == kernel.constants["TMA"]
