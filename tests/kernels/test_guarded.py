"""The guards see what they are for."""

import pytest
import torch

from tests.kernels.guarded import group_sizes, guards, relative_error, surrounded

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.int64]


def beside(value, distance):
    """Return the element that lies so far behind the last one."""
    flat = value.view(-1)
    return flat.as_strided((1,), (1,), flat.storage_offset() + flat.numel() - 1 + distance)


def write_beside(allocate, dtype, distance):
    with guards():
        beside(allocate(dtype), distance).copy_(torch.ones(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("allocate", [
    lambda dtype: torch.empty(3, 5, dtype=dtype),
    lambda dtype: torch.zeros(3, 5, dtype=dtype).new_empty(3, 5),
    lambda dtype: torch.empty_like(torch.zeros(3, 5, dtype=dtype)),
])  # fmt: skip
def test_a_write_beside_a_tensor_is_seen(dtype, allocate):
    for distance in (1, -15):
        with pytest.raises(AssertionError, match="outside"):
            write_beside(allocate, dtype, distance)
    with guards():
        value = allocate(dtype)
        value.copy_(torch.ones(3, 5))
    assert value.float().eq(1).all()


def test_what_is_not_written_is_seen():
    with guards():
        y = torch.empty(4, 4)
        count = torch.empty(4, dtype=torch.int32)
    assert y.isnan().all()
    assert (count < -1).all()
    y[:3] = 1
    assert not relative_error(y, torch.ones(4, 4)) < 1


def test_a_read_beside_a_tensor_is_nan():
    x = surrounded(torch.ones(3, 5).bfloat16())
    assert x.eq(1).all()
    assert x.data_ptr() % 256 == 0
    assert beside(x, 1).isnan()
    assert beside(x, -15).isnan()


def test_sizes_hold_the_edges():
    sizes = group_sizes(16, 6)
    assert {0, 1, 15, 16, 17} <= {size for case in sizes for size in case}
    assert [0] * 6 in sizes
    assert all(len(case) == 6 for case in sizes)
