"""The repaired interpreter calculates as hardware does: the tests of all kernels rest on it."""

import pytest
import torch

from tests.kernels.child import needs_triton
from tests.kernels.interpreted import interpreted

pytestmark = needs_triton

NARROW = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def kernels():
    import tests.kernels.sample_kernels as found

    return found


def product(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(32, 64).to(dtype), torch.randn(16, 64).to(dtype)
    out = torch.empty(32, 16)
    kernels().product[(1,)](a, b, out, 32, 16, 64)
    expected = a.double() @ b.double().T
    return ((out - expected).norm() / expected.norm()).item()


def test_products_accumulate_in_float32():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        assert interpreted(product, dtype) < 1e-6, dtype


def converted(name, back):
    """Return how many of many floats a kernel converts to other bits than torch does."""
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    largest = 440.0 if name == "float8_e4m3fn" else 3e4
    values = torch.cat(
        [torch.randn(2**14), torch.randn(2**14) * 1e-3, torch.linspace(-1, 1, 2**15)]
    )
    values = torch.cat([values, torch.tensor([0.0, -0.0, largest, -largest, 1.949, 2.0**-9])])
    values = values[torch.arange(2**16) % len(values)].clamp(-largest, largest)
    source, expected = values, values.to(dtype)
    if back:
        source, expected = expected, expected.float()
    out = torch.empty_like(expected)
    kernels().copy[(1,)](source, out, len(values))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    return (out.view(bits) != expected.view(bits)).sum().item()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_conversions_equal_torchs_bit_for_bit(name, back):
    assert interpreted(converted, name, back) == 0


def extremes(name):
    values = torch.tensor([1e9, -1e9, float("inf"), float("nan")])
    out = torch.empty(4, dtype=getattr(torch, name))
    kernels().copy[(1,)](values, out, 4)
    return out.float().tolist()


def test_fp8_saturates_and_keeps_nan():
    for name, largest in (("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
        *finite, nan = interpreted(extremes, name)
        assert finite == [largest, -largest, largest]
        assert nan != nan


def arithmetic():
    torch.manual_seed(0)
    a, b = (torch.randn(64).bfloat16() for _ in range(2))
    out = torch.empty(6, 64, dtype=torch.bfloat16)
    kernels().arithmetic[(1,)](a, b, out, 64)
    count = torch.arange(64).float()
    expected = torch.stack([a + b, a * b, a - b, torch.where(a < b, a, b), -a, count.bfloat16()])
    return torch.equal(out, expected)


def test_bfloat16_arithmetic_is_float32_rounded_once():
    assert interpreted(arithmetic)


def ragged():
    from triton.tools.ragged_tma import create_ragged_descriptor

    out = torch.full((9, 16), -1.0)
    kernels().fill_ragged[(1,)](create_ragged_descriptor(out, [4, 16]), 3, 5)
    return out[:, 0].tolist()


def test_a_ragged_store_stays_in_its_rows():
    assert interpreted(ragged) == [-1, -1, -1, 7, 7, 7, 7, 7, -1]


def test_an_error_comes_with_its_traceback_and_the_child_goes_on():
    with pytest.raises(AssertionError, match="no such dtype"):
        interpreted(converted_to_nothing)
    assert interpreted(product, torch.float32) < 1e-6


def converted_to_nothing():
    raise ValueError("no such dtype")
