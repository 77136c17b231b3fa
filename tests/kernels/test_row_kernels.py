"""Triton's norm, activation, rotation and loss: interpreted against float64, and compiled."""

import pytest
import torch

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled, on_each_triton
from tests.kernels.guarded import TOLERANCE, guards, relative_error, surrounded
from tests.kernels.interpreted import interpreted
from trainer.kernels.cross_entropy import reference as cross_entropy
from trainer.kernels.rms_norm import reference as rms_norm
from trainer.kernels.rotary import reference as rotary
from trainer.kernels.swiglu import reference as swiglu

pytestmark = needs_triton
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
EPS = 1e-5


def random(*shape, dtype=torch.float32):
    return surrounded(torch.randn(*shape).to(dtype))


def assert_close(found, exact, dtype=None):
    for one, other in zip(found, exact, strict=True):
        error = relative_error(one, other)
        assert error <= TOLERANCE[dtype or one.dtype], (error, one.shape, one.dtype)


def exact_gradients(function, inputs, gradients):
    """Return outputs and gradients in float64."""
    doubles = [each.double().requires_grad_() for each in inputs]
    out = function(*doubles)
    out = out if isinstance(out, tuple) else (out,)
    wanted = [gradient.double() for gradient in gradients]
    return [*out, *torch.autograd.grad(out, doubles, wanted)]


def check_norm(T, D, dtype, weight_dtype):
    from trainer.kernels.rms_norm import triton

    torch.manual_seed(T + D)
    x, residual, grad, grad_total = (random(T, D, dtype=dtype) for _ in range(4))
    # The kernel rounds the weight to the rows' dtype, and the sum before its norm.
    weight = surrounded(random(D, dtype=dtype).to(weight_dtype))
    total = x + residual
    with guards():
        out, kept, inverse = triton.forward(x, residual, weight, EPS)
        grad_x, grad_weight = triton.backward(grad, grad_total, kept, weight, inverse)
        alone, nothing, _ = triton.forward(kept, None, weight, EPS)
        grad_alone, _ = triton.backward(grad, None, kept, weight, inverse)
    assert torch.equal(kept, total)
    # Equal bits are too much to ask of a GPU, whose compiler fuses the sum into the norm.
    assert_close([alone], [out.double()])
    assert nothing.numel() == 0
    assert grad_weight.dtype == weight_dtype
    norm = lambda x, w: rms_norm.rms_norm(x, w, EPS)  # noqa: E731
    exact = exact_gradients(norm, (total, weight), [grad])
    assert_close([out, grad_alone, grad_weight], exact)
    assert_close([grad_x], [exact[1] + grad_total.double()])


@dtypes
@pytest.mark.parametrize(("T", "D"), [(1, 5), (7, 96), (130, 16), (3, 2100)])
def test_norm(T, D, dtype):
    interpreted(check_norm, T, D, dtype, dtype)


def test_the_weights_gradient_is_summed_in_float32():
    interpreted(check_norm, 600, 32, torch.bfloat16, torch.float32)


def weight_gradient_of_few_programs():
    from trainer.kernels.rms_norm import triton

    triton.PROGRAMS = 3
    check_norm(7, 2100, torch.float32, torch.float32)


def test_a_program_takes_several_tiles_of_rows():
    interpreted(weight_gradient_of_few_programs)


def check_activation(T, F, dtype, is_weighted):
    from trainer.kernels.swiglu import triton

    torch.manual_seed(T + F)
    gate, up = random(T, 2 * F, dtype=dtype).chunk(2, dim=-1)
    grad = random(T, F, dtype=dtype)
    weight = random(T, dtype=dtype) if is_weighted else None
    inputs = [gate, up, weight] if is_weighted else [gate, up]
    with guards():
        out = triton.forward(gate, up, weight)
        gradients = triton.backward(grad, gate, up, weight)
    exact = exact_gradients(swiglu.swiglu, inputs, [grad])
    assert_close([out, *gradients[: len(inputs)]], exact)
    assert is_weighted or gradients[2].numel() == 0


@dtypes
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("T", "F"), [(1, 5), (70, 96), (3, 2100)])
def test_activation_of_parts_of_wider_rows(T, F, dtype, is_weighted):
    interpreted(check_activation, T, F, dtype, is_weighted)


def check_rotation(H, K, dtype, *, of_each_row=False, is_view=False):
    from trainer.kernels.rotary import triton

    torch.manual_seed(H + K)
    x = random(2, 5, H, K, dtype=dtype)
    if is_view:
        x = random(2, H, 5, K, dtype=dtype).transpose(1, 2)
    shape = (2, 5, 1, K // 2) if of_each_row else (5, 1, K // 2)
    cos, sin = random(*shape), random(*shape)
    with guards():
        there, back = (triton.rotary(x, cos, sin, inverse) for inverse in (False, True))
    angles = cos.double(), sin.double()
    exact = rotary.rotary(x.double(), *angles)
    assert_close([there, back], [exact, rotary.rotary(x.double(), angles[0], -angles[1])])


@dtypes
@pytest.mark.parametrize(("H", "K"), [(1, 2), (3, 12), (5, 64), (33, 128)])
def test_rotation(H, K, dtype):
    interpreted(check_rotation, H, K, dtype)


def rotation_of_each_row_and_of_views():
    check_rotation(3, 12, torch.bfloat16, of_each_row=True)
    check_rotation(3, 12, torch.bfloat16, is_view=True)


def test_rotation_of_each_row_and_of_views():
    interpreted(rotation_of_each_row_and_of_views)


def check_loss(T, V, dtype, z_loss):
    from trainer.kernels.cross_entropy import triton

    torch.manual_seed(T + V)
    logits, labels = random(T, V, dtype=dtype) * 4, torch.randint(0, V, (T,))
    labels[0] = cross_entropy.IGNORED
    logits[-1, 0] = float("-inf")
    labels[-1] = V - 1
    exact = logits.double()
    expected = cross_entropy.replace_by_gradient(exact, labels, z_loss)
    with guards():
        found = triton.replace_by_gradient(logits, labels, z_loss)
    for part, wanted in zip(found, expected, strict=True):
        assert part.tolist() == pytest.approx(wanted.tolist(), rel=1e-6, abs=1e-5)
    assert_close([logits], [exact])
    assert logits[0].count_nonzero() == 0


@dtypes
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(("T", "V"), [(6, 3), (5, 37), (3, 9000)])
def test_loss(T, V, dtype, z_loss):
    interpreted(check_loss, T, V, dtype, z_loss)


def extreme_losses():
    from trainer.kernels.cross_entropy import triton

    logits = torch.tensor([[400.0, -400.0], [0.0, float("nan")], [0.0, 0.0]])
    found = [
        triton.replace_by_gradient(logits[row : row + 1].clone(), torch.tensor([label]), 0.0)[0]
        for row, label in ((0, 1), (1, 0), (2, 2))
    ]
    ignored = torch.full((1, 2), float("nan"))
    nothing = triton.replace_by_gradient(ignored, torch.tensor([cross_entropy.IGNORED]), 0.1)
    nothing = [each.item() for each in nothing]
    return [each.item() for each in found], nothing, ignored.tolist()


def test_losses_of_hopeless_guesses_no_numbers_and_labels_of_no_class():
    (hopeless, not_a_number, no_class), nothing, gradient = interpreted(extreme_losses)
    assert hopeless == 800.0
    assert not_a_number != not_a_number
    assert no_class != no_class
    assert (nothing, gradient) == ([0.0, 0.0], [[0.0, 0.0]])


def refused():
    from trainer.kernels.rms_norm import triton

    x = torch.ones(2, 4, dtype=torch.float64)
    try:
        triton.forward(x, None, x[0], EPS)
    except TypeError as error:
        return str(error)
    return "taken"


def test_float64_is_refused():
    assert "no torch.float64" in interpreted(refused)


def launch_all():
    from trainer.kernels.cross_entropy import triton as loss
    from trainer.kernels.rms_norm import triton as norm
    from trainer.kernels.rotary import triton as rotation
    from trainer.kernels.swiglu import triton as activation

    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    for D in (128, 4096, 8192):
        x, weight, inverse = empty(512, D), torch.empty(D), torch.empty(512)
        norm.forward(x, None, weight, EPS)
        norm.forward(x, x, weight, EPS)
        norm.backward(x, None, x, weight, inverse)
        norm.backward(x, x, x, weight, inverse)
    for F in (768, 14336):
        x, weight = empty(512, F), torch.empty(512)
        activation.forward(x, x, None)
        activation.forward(x, x, weight)
        activation.backward(x, x, x, None)
        activation.backward(x, x, x, weight)
    for H in (8, 32):
        x, angles = empty(2, 64, H, 128), torch.empty(64, 1, 64)
        rotation.rotary(x, angles, angles, False)
    loss.replace_by_gradient(empty(64, 128256), torch.zeros(64, dtype=torch.int64), 1e-4)


@pytest.mark.matrix
@on_each_triton
def test_nothing_spills_and_rows_are_read_16_bytes_at_a_time(triton):
    found = compiled(launch_all, triton=triton)
    assert len(found) >= 20
    for kernel in found:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.instructions["LDG128"] > 0, kernel


def launch_many_lengths():
    from trainer.kernels.cross_entropy import triton as loss
    from trainer.kernels.rms_norm import triton as norm
    from trainer.kernels.swiglu import triton as activation

    for T in range(100, 120):
        x = torch.empty(T, 1024, dtype=torch.bfloat16)
        norm.forward(x, None, torch.empty(1024), EPS)
        norm.backward(x, None, x, torch.empty(1024), torch.empty(T))
        activation.forward(x, x, None)
        loss.replace_by_gradient(x, torch.zeros(T, dtype=torch.int64), 0.0)


def test_a_new_number_of_tokens_compiles_nothing_anew():
    found = compiled(launch_many_lengths)
    for name in {kernel.name for kernel in found}:
        assert sum(kernel.name == name for kernel in found) <= 2, name
