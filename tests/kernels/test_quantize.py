"""Quantisation by blocks: the reference's properties, and Triton's bits beside the reference's."""

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled, on_each_triton
from tests.kernels.guarded import guards, surrounded
from tests.kernels.interpreted import interpreted
from trainer.kernels.quantize import op, reference

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["row", "column", "both"]


def values(*shape, dtype=torch.float32):
    """Return blocks of very different sizes, one of zeros, and an outlier."""
    torch.manual_seed(sum(shape))
    x = torch.randn(*shape) * torch.rand(*shape[:-1], 1).mul(8).exp2()
    x[..., : shape[-2] // 3, :9] = 0.0
    x[..., 0, 0] = 3e4
    x[..., -1, :] = 0.0
    return x.to(dtype)


def restored(q, scale):
    return reference.dequant_act(q, scale, torch.float64)


@pytest.mark.parametrize("pow2", [False, True])
def test_a_quantised_value_is_off_by_a_sixteenth_at_most(pow2):
    x = values(37, 384)
    q, scale = reference.quant_act(x, pow2=pow2)
    size = x.abs().view(37, 3, 128).amax(2).repeat_interleave(128, 1)
    # Half of e4m3's step: 2^-4 of normal numbers; below 2^-6 of the largest, an absolute step.
    bound = (x.abs() * 2**-4).maximum(size * (2 if pow2 else 1) * 2**-10 / 448)
    assert ((restored(q, scale) - x).abs() <= bound * 1.0001).all()


def test_each_block_of_a_row_uses_the_whole_range_on_its_own():
    x = values(5, 256)
    q, scale = reference.quant_act(x)
    assert scale.shape == (2, 5)
    for row in range(5):
        for block in range(2):
            part = x[row, 128 * block : 128 * (block + 1)]
            expected = max(part.abs().max().item(), 1e-12) / 448
            assert scale[block, row].item() == pytest.approx(expected, rel=1e-6)
            assert q.float()[row, 128 * block : 128 * (block + 1)].abs().max() in (0, 448)


def test_scales_of_powers_of_two_are_the_next_exact_powers():
    x = values(64, 128)
    x[0] = 448.0
    plain, rounded = (reference.quant_act(x, pow2=pow2)[1] for pow2 in (False, True))
    mantissa, _ = rounded.frexp()
    assert (mantissa == 0.5).all()
    assert (rounded >= plain).all()
    assert (rounded < 2 * plain).all()
    assert rounded[0, 0] == 1.0


def test_weights_have_a_scale_for_each_square_and_the_same_transposed():
    w = values(2, 130, 200)
    q, scale, q_t, scale_t = reference.quant_weight(w, layout="both")
    assert scale.shape == (2, 2, 2)
    assert torch.equal(q_t.float(), q.float().mT)
    assert torch.equal(scale_t, scale.mT)
    for e in range(2):
        square = w[e, 128:, :128]
        assert scale[e, 1, 0].item() == pytest.approx(square.abs().max().item() / 448, rel=1e-6)
        back = reference.dequant(q[e], scale[e], torch.float32)
        assert (back - w[e]).norm() < 0.04 * w[e].norm()
        again, same = reference.quant_weight(back.unsqueeze(0))
        assert torch.equal(again[0].float(), q[e].float())
        torch.testing.assert_close(same[0], scale[e])


def test_columns_are_rows_of_the_transposed():
    x = values(130, 256)
    q, scale = reference.quant_act(x, layout="column")
    padded = torch.nn.functional.pad(x.T, (0, 126))
    expected, expected_scale = reference.quant_act(padded)
    assert torch.equal(q.float(), expected[:, :130].float())
    assert torch.equal(scale, expected_scale)


def test_what_is_no_number_stays_none_and_spoils_no_neighbour():
    x = torch.ones(2, 128)
    x[0, 3], x[1, 5] = float("nan"), float("inf")
    q, scale = reference.quant_act(x)
    assert q[0, 3].isnan()
    assert (q[0].float().nan_to_num(448) == 448).all()
    assert scale[0, 0].item() == pytest.approx(1 / 448)
    assert q[1, 5].isnan()


def test_what_fits_no_block_or_layout_is_refused():
    with pytest.raises(ValueError, match="100 values"):
        reference.quant_act(torch.ones(2, 100))
    with pytest.raises(ValueError, match="diagonal"):
        reference.quant_act(torch.ones(2, 128), layout="diagonal")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_keep_their_promises(layout, dtype):
    opcheck(op._quant_act, (values(30, 256, dtype=dtype), False, layout))
    opcheck(op._quant_weight, (values(2, 100, 130, dtype=dtype), True, layout))
    q, scale = reference.quant_weight(values(1, 130, 100))
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")  # others compare inputs: no fp8
    opcheck(op.dequant, (q[0], scale[0], torch.bfloat16), test_utils=tests)


class DividesAsCUDA(TorchDispatchMode):
    """Multiply by the rounded reciprocal of a number (torch's BinaryDivTrueKernel.cu)."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.div.Tensor:
            divisor = torch.as_tensor(args[1], dtype=torch.float32)
            # A tensor of no dimensions on the CPU is a number to CUDA.
            if not divisor.ndim:
                return args[0] * divisor.reciprocal()
        return function(*args, **(kwargs or {}))


def test_scales_are_the_rounded_quotient_where_cuda_divides():
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0))
    largest = x.abs().amax(1)
    # Rounding a quotient of fp32 numbers to fp64 first changes no bit of its fp32 (Figueroa 1995).
    expected = (largest.double() / 448).float()
    with DividesAsCUDA():
        _, scale = reference.quant_act(x)
        approximate = largest / 448.0
    assert torch.equal(scale[0], expected)
    assert (approximate != expected).float().mean() > 0.3


def same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        kind = torch.uint8 if one.element_size() == 1 else torch.int32
        assert torch.equal(one.view(kind), other.view(kind)), one.dtype


def check_act(M, K, dtype, pow2, layout):
    from trainer.kernels.quantize import triton

    x = values(M, K, dtype=dtype)
    x[M // 2, 1] = float("nan")
    with guards():
        found = triton.quant_act(surrounded(x), pow2=pow2, layout=layout)
    same_bits(found, reference.quant_act(x, pow2=pow2, layout=layout))


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("M", "K"), [(3, 128), (33, 256), (130, 128)])
def test_activations_have_the_references_bits(M, K, dtype, pow2, layout):
    interpreted(check_act, M, K, dtype, pow2, layout)


def check_weight(E, N, K, dtype, pow2, layout):
    from trainer.kernels.quantize import triton

    w = values(E, N, K, dtype=dtype)
    with guards():
        found = triton.quant_weight(surrounded(w), pow2=pow2, layout=layout)
    same_bits(found, reference.quant_weight(w, pow2=pow2, layout=layout))


@needs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "pow2"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize(("E", "N", "K"), [(1, 128, 256), (2, 130, 100)])
def test_weights_have_the_references_bits(E, N, K, dtype, pow2, layout):
    interpreted(check_weight, E, N, K, dtype, pow2, layout)


def check_dequant(M, N, dtype):
    from trainer.kernels.quantize import triton

    q, scale = (each[0] for each in reference.quant_weight(values(1, M, N)))
    with guards():
        found = triton.dequant(surrounded(q), surrounded(scale), dtype)
    assert torch.equal(found, reference.dequant(q, scale, dtype))


@needs_triton
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (128, 256), (130, 200)])
def test_dequantised_values_have_the_references_bits(M, N, dtype):
    interpreted(check_dequant, M, N, dtype)


def launch_all():
    from trainer.kernels.quantize import triton

    x, w = (torch.empty(s, dtype=torch.bfloat16) for s in ((1024, 7168), (2, 4096, 7168)))
    for layout in LAYOUTS:
        triton.quant_act(x, layout=layout)
        triton.quant_weight(w, layout=layout)
    q, scale = torch.empty(4096, 7168, dtype=torch.float8_e4m3fn), torch.empty(32, 56)
    triton.dequant(q, scale, torch.bfloat16)


@pytest.mark.matrix
@needs_triton
@on_each_triton
def test_nothing_spills_and_rows_are_read_16_bytes_at_a_time(triton):
    found = compiled(launch_all, triton=triton)
    assert len(found) == 7
    for kernel in found:
        assert kernel.spill_bytes == 0, kernel
        assert kernel.instructions["LDG128"] > 0, kernel
