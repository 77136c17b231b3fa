"""Triton makes a size of 1 a constant, which the interpreter does not: kernels compile with it."""

import pytest
import torch

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled

pytestmark = [needs_triton, pytest.mark.matrix]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def launch_rows():
    from trainer.kernels.cross_entropy import triton as loss
    from trainer.kernels.rms_norm import triton as norm
    from trainer.kernels.rotary import triton as rotation
    from trainer.kernels.swiglu import triton as activation

    for width in (1, 64):
        x, one = empty(1, width), torch.empty(1)
        norm.forward(x, x, empty(width), 1e-5)
        norm.backward(x, x, x, empty(width), one)
        activation.forward(x, x, one)
        activation.backward(x, x, x, one)
        loss.replace_by_gradient(x, torch.zeros(1, dtype=torch.int64), 0.0)
    for width in (2, 128):
        angles = torch.empty(1, 1, width // 2)
        rotation.rotary(empty(1, 1, 1, width), angles, angles, True)


def launch_groups():
    from trainer.kernels.grouped_gemm_fp8 import triton as fp8
    from trainer.kernels.moe import triton as moe
    from trainer.kernels.quantize import triton as quantize

    e4m3 = torch.float8_e4m3fn
    quantize.quant_act(empty(1, 128), layout="both")
    quantize.quant_weight(empty(1, 1, 1), layout="both")
    quantize.dequant(empty(1, 1, dtype=e4m3), torch.empty(1, 1), torch.bfloat16)
    offs = torch.zeros(1, dtype=torch.int32)
    for width in (1, 8):
        moe.moe_up_swiglu(empty(1, width), empty(1, 2, width), offs, offs)
    moe.scale_by_router_weight(empty(1, 1), empty(1, 1), offs.view(1, 1), empty(1, 1))
    values = empty(1, 128, dtype=e4m3), empty(1, 128, 128, dtype=e4m3)
    scales = torch.empty(1, 1), torch.empty(1, 1, 1)
    for tiling in (fp8.POINTERS, fp8.HOPPER_TMA):
        fp8.grouped_mm_fp8(values[0], scales[0], values[1], scales[1], offs, tiling=tiling)


def test_operations_on_rows_compile():
    assert len(compiled(launch_rows)) == 12


def test_products_of_groups_and_quantisation_compile():
    names = [kernel.name for kernel in compiled(launch_groups)]
    assert {"_quant_act", "_quant_weight", "_dequant", "_scale_by_router_weight"} <= set(names)
    assert names.count("_moe_up_swiglu") == 2
    assert names.count("_grouped_mm_fp8") == 2
