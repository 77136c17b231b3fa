"""Permutations of rows against loops over tokens in float64."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.cases import also
from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled, on_each_triton
from tests.kernels.guarded import TOLERANCE, guards, relative_error, surrounded
from tests.kernels.interpreted import interpreted
from trainer.kernels.permute import op, reference
from trainer.kernels.permute.permutation import TORCH, TRITON
from trainer.kernels.routing.reference import routing_plan

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0, 2, 5), (1, 1, 1), (5, 3, 7), (8, 2, 64), (3, 1, 1030)]


def inputs(tokens, num_choices, width, dtype=torch.float64):
    """Return rows of tokens, rows of choices, slots and weights."""
    torch.manual_seed(0)
    slot = routing_plan(torch.randint(0, 4, (tokens, num_choices)), 4).slot
    x, y = torch.randn(tokens, width), torch.randn(tokens * num_choices, width)
    return x.to(dtype), y.to(dtype), slot, torch.rand(tokens, num_choices).to(dtype)


def by_loops(x, y, slot, weight):
    """Return permute(x), unpermute(y) and row_dots(x, y) in float64."""
    x, y, weight = x.double(), y.double(), weight.double()
    permuted, sums = torch.full_like(y, float("nan")), torch.zeros_like(x)
    dots = torch.zeros_like(weight)
    for token, row in enumerate(slot.tolist()):
        for choice, place in enumerate(row):
            permuted[place] = weight[token, choice] * x[token]
            sums[token] += weight[token, choice] * y[place]
            dots[token, choice] = (x[token] * y[place]).sum()
    return permuted, sums, dots


def errors(module, shape, dtype, weighted):
    x, y, slot, weight = (surrounded(value) for value in inputs(*shape, dtype))
    if not weighted:
        weight.fill_(1)
    given = weight if weighted else None
    with guards():
        got = module.permute(x, slot, given), module.unpermute(y, slot, given)
        dots = module.row_dots(x, y, slot)
    expected = by_loops(x, y, slot, weight)
    assert got[0].dtype == got[1].dtype == dtype
    assert dots.dtype == torch.float32
    return [relative_error(*pair) for pair in zip((*got, dots), expected, strict=True)]


def check_triton(shape, dtype, weighted):
    from trainer.kernels.permute import triton

    *rounded, dots = errors(triton, shape, dtype, weighted)
    assert all(error < TOLERANCE[dtype] for error in rounded)
    assert dots < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_the_reference_moves_and_sums_rows(shape, dtype, weighted):
    *rounded, dots = errors(reference, shape, dtype, weighted)
    assert all(error < TOLERANCE[dtype] for error in rounded)
    assert dots < TOLERANCE[torch.float32]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_triton_moves_and_sums_rows(shape, dtype, weighted):
    interpreted(check_triton, shape, dtype, weighted)


def test_there_and_back_is_a_multiple():
    x, _, slot, _ = inputs(9, 3, 5)
    torch.testing.assert_close(op.unpermute(op.permute(x, slot), slot), 3 * x)


def saved_bytes(function, *inputs):
    """Return a result and the bytes of the tensors that its backward pass reads."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(*inputs), sum(sizes)


def test_rows_are_saved_for_the_gradient_of_their_weights_alone():
    x, y, slot, weight = inputs(8, 2, 64, torch.bfloat16)
    slot_bytes, weight_bytes = slot.numel() * 4, weight.numel() * weight.element_size()
    for function, rows in ((op.permute, x), (op.unpermute, y)):
        rows.requires_grad_()
        assert saved_bytes(function, rows, slot)[1] == slot_bytes
        assert saved_bytes(function, rows, slot, weight)[1] == slot_bytes + weight_bytes
        wanted = weight.clone().requires_grad_()
        everything = slot_bytes + weight_bytes + rows.numel() * 2
        assert saved_bytes(function, rows, slot, wanted)[1] == everything
    out, _ = saved_bytes(op.unpermute, y, slot)
    grad = torch.randn_like(out)
    (grad_y,) = torch.autograd.grad(out, y, grad)
    for token, places in enumerate(slot.tolist()):
        assert torch.equal(grad_y[places], grad[token].expand(2, -1))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients(check):
    x, y, slot, weight = inputs(4, 2, 3)
    for value in (x, y, weight):
        value.requires_grad_()
    assert check(lambda x, w: op.permute(x, slot, w), (x, weight))
    assert check(lambda y, w: op.unpermute(y, slot, w), (y, weight))
    assert check(lambda x, y: op.row_dots(x, y, slot), (x, y))
    assert check(lambda x: op.permute(x, slot), (x,))
    assert check(lambda y: op.unpermute(y, slot), (y,))


@pytest.mark.parametrize("dtype", [torch.float32, *also(torch.bfloat16)])
def test_they_are_operations_that_compile(dtype):
    x, y, slot, weight = inputs(4, 2, 3, dtype)
    for value in (x, y, weight):
        value.requires_grad_()
    torch.library.opcheck(op.permute, (x, slot, weight))
    torch.library.opcheck(op.unpermute, (y, slot, weight))
    torch.library.opcheck(op.row_dots, (x, y, slot))

    def loss(x, weight):
        return op.unpermute(op.permute(x, slot).square(), slot, weight).sum()

    eager = torch.autograd.grad(loss(x, weight), (x, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    fused = torch.autograd.grad(compiled(x, weight), (x, weight))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(fused, eager, **tolerance)


def launch(token_counts, dtype):
    from trainer.kernels.permute import triton

    for tokens in token_counts:
        x, y = torch.empty(tokens, 4096, dtype=dtype), torch.empty(tokens * 8, 4096, dtype=dtype)
        slot, weight = torch.empty(tokens, 8, dtype=torch.int32), torch.empty(tokens, 8)
        triton.permute(x, slot, weight)
        triton.unpermute(y, slot, weight)
        triton.row_dots(x, y, slot)


@pytest.mark.matrix
@needs_triton
@on_each_triton
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_permutations_compile_once_for_all_token_counts(arch, triton):
    found = compiled(launch, list(range(1, 21)), torch.bfloat16, arch=arch, triton=triton)
    assert len(found) == 3
    assert [kernel.spill_bytes for kernel in found] == [0, 0, 0]


@pytest.mark.parametrize("permutation", [TORCH, TRITON], ids=["torch", "triton"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_permutation_takes_rows_there_and_back(permutation, shape):
    """On a CPU the operations are the references."""
    torch.manual_seed(0)
    tokens, num_choices, width = shape
    plan = permutation.plan(torch.randint(0, 4, (tokens, num_choices)), 4)
    x, y, slot, weight = inputs(*shape)
    assert torch.equal(slot, plan.slot)
    permuted, sums, _ = by_loops(x, y, slot, torch.ones_like(weight))
    torch.testing.assert_close(permutation.gather(x, plan), permuted)
    torch.testing.assert_close(permutation.combine(y, plan), sums)
    if width < 10:
        assert gradcheck(lambda x: permutation.gather(x, plan), x.requires_grad_())
        assert gradcheck(lambda y: permutation.combine(y, plan), y.requires_grad_())
