"""The operators as torch sees them: their gradients, and what they tell tracers and compilers."""

import ast
import inspect

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from tests.kernels.child import ROOT, needs_triton
from trainer.kernels.cross_entropy import op as cross_entropy
from trainer.kernels.cross_entropy import reference as cross_entropy_reference
from trainer.kernels.registry import load
from trainer.kernels.rms_norm import op as rms_norm
from trainer.kernels.rms_norm import reference as rms_norm_reference
from trainer.kernels.rotary import op as rotary
from trainer.kernels.swiglu import op as swiglu
from trainer.kernels.swiglu import reference as swiglu_reference
from trainer.kernels.swiglu.reference import clamped_swiglu

EPS = 1e-5


def operators():
    """Yield the function of each operation that Triton computes on GPUs, and what computes it."""
    for path in sorted((ROOT / "kernels").glob("*/*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(function, "decorator_list", ()):
                keywords = getattr(decorator, "keywords", ())
                if target := [k.value.value for k in keywords if k.arg == "cuda"]:
                    yield pytest.param(function, target[0], id=function.name)


@needs_triton
@pytest.mark.parametrize(("function", "target"), operators())
def test_what_computes_on_gpus_takes_the_same_arguments(function, target):
    assert function.args.kwonlyargs == [], "arguments are passed by position"
    inspect.signature(load(f"trainer.kernels.{target}")).bind(*function.args.args)


def rows(*shape, dtype=torch.float64, needs=True):
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype).requires_grad_(needs)


def angles(width, dtype=torch.float32):
    turns = torch.randn(5, 1, width // 2, dtype=dtype)
    return turns.cos(), turns.sin()


def cases(dtype):
    x, weight = rows(2, 5, 8, dtype=dtype), rows(8, dtype=dtype)
    wide = rows(4, 12, dtype=dtype)
    gate, up = wide.detach().chunk(2, dim=-1)
    heads = rows(2, 5, 3, 8, dtype=dtype)
    inverse = rms_norm_reference.inverse_rms(x.detach(), EPS)
    cos, sin = angles(8, torch.promote_types(dtype, torch.float32))
    labels = torch.tensor([0, -100, 3, 2])
    return {
        "norm": (rms_norm._forward, (x, None, weight, EPS)),
        "norm of a sum": (rms_norm._forward, (x, x.detach() * 2, weight, EPS)),
        "norm of a transposed row": (rms_norm._forward, (x.transpose(0, 1), None, weight, EPS)),
        "norm backward": (
            rms_norm._backward,
            tuple(each.detach() for each in (x, x, x, weight, inverse)),
        ),
        "activation": (swiglu.swiglu, (gate.requires_grad_(), up.requires_grad_(), None)),
        "weighted activation": (swiglu.swiglu, (gate, up, rows(4, dtype=dtype))),
        "activation backward": (
            swiglu._backward,
            (gate.detach(), gate.detach(), up.detach(), rows(4, dtype=dtype, needs=False)),
        ),
        "rotation": (rotary._rotary, (heads, cos, sin, False)),
        "rotation back": (rotary._rotary, (heads.transpose(1, 2)[:, :5], cos[:3], sin[:3], True)),
        "loss": (cross_entropy.replace_by_gradient, (wide.detach(), labels, 0.1)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", cases(torch.float32))
def test_an_operator_keeps_its_promises(name, dtype):
    operator, arguments = cases(dtype)[name]
    opcheck(operator, arguments)


def test_gradients_of_the_norm_of_a_sum_equal_finite_differences():
    arguments = rows(3, 4, 6), rows(3, 4, 6) + 1, rows(6)
    both = lambda x, r, w: rms_norm.add_rms_norm(x, r, w, EPS)  # noqa: E731
    assert gradcheck(both, arguments)
    assert gradcheck(lambda *a: both(*a)[1].square(), arguments)
    reference = lambda x, r, w: rms_norm_reference.add_rms_norm(x, r, w, EPS)  # noqa: E731
    assert gradgradcheck(reference, arguments)
    torch.testing.assert_close(both(*arguments), reference(*arguments))


@pytest.mark.parametrize("function", [swiglu.swiglu, swiglu_reference.swiglu])
def test_gradients_of_a_weighted_activation_equal_finite_differences(function):
    gate, up = rows(4, 12).chunk(2, dim=-1)
    weight = rows(4)
    expected = gate / (1 + (-gate).exp()) * up * weight.unsqueeze(-1)
    torch.testing.assert_close(function(gate, up, weight), expected)
    assert gradcheck(function, (gate, up, weight))


def test_references_have_second_derivatives():
    halves = rows(3, 5), rows(3, 5) + 1
    for row_weight in ((), (rows(3),)):
        assert gradgradcheck(swiglu_reference.swiglu, (*halves, *row_weight))
        clamped = lambda g, u, *w: clamped_swiglu(g, u, 1.0, 1.7, *w)  # noqa: E731
        assert gradgradcheck(clamped, (*halves, *row_weight))
    norm = lambda x, w: rms_norm_reference.rms_norm(x, w, EPS)  # noqa: E731
    assert gradgradcheck(norm, (rows(3, 5), rows(5)))


def test_a_rotation_has_derivatives_of_every_order():
    cos, sin = angles(6, torch.float64)
    turn = lambda x: rotary.rotary(x, cos, sin).pow(3)  # noqa: E731
    assert gradcheck(turn, (rows(2, 5, 3, 6),))
    assert gradgradcheck(turn, (rows(2, 5, 3, 6),))


def test_the_loss_with_its_operator_equals_the_reference():
    hidden, weight = rows(9, 6), rows(11, 6)
    labels = torch.tensor([1, 2, -100, 4, 10, 0, -100, 3, 3])
    found = []
    for loss in (
        cross_entropy.linear_cross_entropy,
        cross_entropy_reference.linear_cross_entropy,
    ):
        value = loss(hidden, weight, labels, z_loss=0.1, chunk=4)
        found.append((value, *torch.autograd.grad(value, (hidden, weight))))
    torch.testing.assert_close(*found)


def a_block(x, residual, weight, gate, heads, cos, sin):
    normal, total = rms_norm.add_rms_norm(x, residual, weight, EPS)
    gated = swiglu.swiglu(gate, normal) + rms_norm.rms_norm(total, weight, EPS)
    return gated.square().sum() + rotary.rotary(heads, cos, sin).pow(3).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_are_compiled_in_one_graph(dtype):
    tensors = [rows(*s, dtype=dtype) for s in ((2, 5, 8),) * 2 + ((8,), (2, 5, 8), (2, 5, 3, 8))]
    cos, sin = angles(8)
    compiled = torch.compile(a_block, fullgraph=True, backend="aot_eager")
    found = []
    for function in (a_block, compiled):
        value = function(*tensors, cos, sin)
        found.append((value, *torch.autograd.grad(value, tensors)))
    torch.testing.assert_close(*found)


def test_the_gradient_of_the_loss_equals_finite_differences():
    labels = torch.tensor([1, -100, 4, 0])
    loss = lambda h, w: cross_entropy.linear_cross_entropy(h, w, labels, z_loss=0.1, chunk=3)  # noqa: E731
    assert gradcheck(loss, (rows(4, 3), rows(5, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_is_compiled_in_one_graph(dtype):
    hidden, weight = rows(9, 6, dtype=dtype), rows(11, 6, dtype=dtype)
    labels = torch.tensor([1, 2, -100, 4, 10, 0, -100, 3, 3])
    loss = cross_entropy.linear_cross_entropy
    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        value = function(hidden, weight, labels, z_loss=0.1, chunk=4)
        found.append((value, *torch.autograd.grad(value, (hidden, weight))))
    torch.testing.assert_close(*found)
