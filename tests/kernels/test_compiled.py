"""The driver without a device records what is compiled: the checks of all kernels rest on it."""

import pytest
import torch

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled, on_each_triton

pytestmark = needs_triton


def kernels():
    import tests.kernels.sample_kernels as found

    return found


def launch_product(m, n, k, warps):
    a, b = torch.empty(m, k, dtype=torch.bfloat16), torch.empty(n, k, dtype=torch.bfloat16)
    out = torch.empty(m, n)
    for _ in range(2):
        kernels().product[(3, 2)](a, b, out, m, n, k, num_warps=warps, num_stages=2)


@on_each_triton
def test_a_compilation_is_recorded_with_its_constants_and_instructions(triton):
    (kernel,) = compiled(launch_product, 64, 128, 64, 4, triton=triton)
    assert (kernel.name, kernel.warps, kernel.stages) == ("product", 4, 2)
    assert kernel.constants == {"M": 64, "N": 128, "K": 64}
    assert kernel.grid == (3, 2, 1)
    assert kernel.shared_bytes >= 64 * 64 * 2 + 128 * 64 * 2  # both operands of a Hopper product
    assert kernel.instructions["HGMMA"] > 0
    assert "HMMA" not in kernel.instructions
    assert 0 < kernel.registers <= 255
    assert kernel.spill_bytes == 0


@pytest.mark.matrix
def test_the_target_is_the_one_asked_for():
    (kernel,) = compiled(launch_product, 64, 128, 64, 4, arch=80)
    assert kernel.instructions["HMMA"] > 0
    assert "HGMMA" not in kernel.instructions


@pytest.mark.matrix
def test_spills_are_seen():
    """A warp cannot hold 128 x 256 sums: 1,024 registers a thread."""
    (kernel,) = compiled(launch_product, 128, 256, 32, 1)
    assert kernel.spill_bytes > 1000
    assert kernel.instructions["STL"] > 0


@pytest.mark.matrix
def test_what_does_not_fit_into_shared_memory_is_refused():
    with pytest.raises(AssertionError, match="OutOfResources"):
        compiled(launch_product, 256, 512, 256, 8)


def launch_copies(sizes):
    for size in sizes:
        values = torch.zeros(size)
        kernels().copy[(1,)](values, values, size)


def test_each_set_of_constants_is_one_compilation():
    found = compiled(launch_copies, [64, 128, 64])
    assert [kernel.constants["SIZE"] for kernel in found] == [64, 128]
    assert [kernel.constants["SIZE"] for kernel in compiled(launch_copies, [128])] == [128]
