"""Norm, rotation and activation against their formulas in float64."""

import cmath

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.kernels.implementations import load_implementations
from trainer.model_zoo.layers.rotary import frequencies, rotation


def implementations(operation):
    return pytest.mark.parametrize("kernel", load_implementations(operation).values())


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@implementations("rms_norm")
@pytest.mark.parametrize("width", [1, 5, 64])
def test_rms_norm_divides_by_the_root_of_the_mean_square(kernel, width):
    torch.manual_seed(0)
    x, weight = doubles(3, 4, width), doubles(width)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(kernel(x, weight, 1e-5), expected)
    assert gradcheck(lambda x, w: kernel(x, w, 1e-5), (x, weight))


@implementations("rms_norm")
def test_rms_norm_of_bf16_is_computed_wider(kernel):
    torch.manual_seed(0)
    x, weight = (torch.randn(8, 512) * 30).bfloat16(), torch.rand(512) + 0.5
    out = kernel(x, weight, 1e-5)
    exact = kernel(x.double(), weight.bfloat16().double(), 1e-5)
    assert out.dtype == torch.bfloat16
    # The result is rounded to bf16 (2^-9) once or twice, not at every step.
    assert ((out - exact).abs() <= exact.abs() * 2**-8).all()


@implementations("rms_norm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_norm_are_those_in_float64_rounded(kernel, dtype):
    torch.manual_seed(0)
    x = (torch.randn(5, 7, 96) * 3).to(dtype).requires_grad_()
    weight = (torch.rand(96) + 0.5).to(dtype).requires_grad_()
    grad = torch.randn(5, 7, 96).to(dtype)
    found = torch.autograd.grad(kernel(x, weight, 1e-5), (x, weight), grad)
    wide_x, wide_weight = (each.detach().double().requires_grad_() for each in (x, weight))
    normal = wide_x * (wide_x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = torch.autograd.grad(normal * wide_weight, (wide_x, wide_weight), grad.double())
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        error = (ours - theirs).norm() / theirs.norm()
        assert error < torch.finfo(dtype).eps


def test_a_norm_on_a_cpu_keeps_its_input_and_a_number_of_each_row():
    kept = []
    x, weight = torch.randn(4, 16).bfloat16().requires_grad_(), torch.ones(16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        load_implementations("rms_norm")["torch"](x, weight, 1e-5)
    assert sum(each.nbytes for each in kept) == x.nbytes + 16 * 2 + 4 * 4


@implementations("swiglu")
def test_swiglu_gates_with_silu(kernel):
    torch.manual_seed(0)
    gate, up = doubles(3, 7), doubles(3, 7)
    torch.testing.assert_close(kernel(gate, up), gate / (1 + (-gate).exp()) * up)
    assert gradcheck(kernel, (gate, up))


@implementations("rotary")
@pytest.mark.parametrize("width", [2, 6])
def test_rotary_turns_each_pair_by_its_positions_angle(kernel, width):
    torch.manual_seed(0)
    x = doubles(1, 5, 3, width)
    cos, sin = (t.double() for t in rotation(torch.arange(5), frequencies(width, 100.0)))
    out = kernel(x, cos, sin)
    half = width // 2
    for position in range(5):
        for pair in range(half):
            turn = cmath.exp(1j * position * 100.0 ** (-2 * pair / width))
            for head in range(3):
                a, b = x[0, position, head, pair].item(), x[0, position, head, pair + half].item()
                turned = complex(a, b) * turn
                assert out[0, position, head, pair].item() == pytest.approx(turned.real, abs=1e-6)
                second = out[0, position, head, pair + half].item()
                assert second == pytest.approx(turned.imag, abs=1e-6)
    assert gradcheck(lambda x: kernel(x, cos, sin), (x,))


@implementations("rotary")
def test_rotary_takes_positions_of_each_row_and_keeps_the_dtype(kernel):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 3, 8).bfloat16()
    positions = torch.tensor([[0, 1, 2, 3], [7, 8, 0, 1]])
    freq = frequencies(8, 10000.0)
    together = kernel(x, *rotation(positions, freq))
    assert together.dtype == torch.bfloat16
    for row in range(2):
        alone = kernel(x[row : row + 1], *rotation(positions[row], freq))
        assert torch.equal(together[row : row + 1], alone)


def test_a_rotation_has_second_derivatives():
    torch.manual_seed(0)
    cos, sin = (t.double() for t in rotation(torch.arange(5), frequencies(6, 100.0)))
    for kernel in load_implementations("rotary").values():
        assert gradgradcheck(
            lambda x, kernel=kernel: kernel(x, cos, sin).pow(3), (doubles(2, 5, 3, 6),)
        )
