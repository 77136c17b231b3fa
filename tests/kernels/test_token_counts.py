"""Kernels are compiled for any number of tokens at once, and launched for none at all."""

import pytest
import torch

from tests.kernels.child import needs_triton
from tests.kernels.compiled import compiled
from tests.kernels.interpreted import interpreted

pytestmark = needs_triton

COUNTS = range(1000, 1020)
E4M3 = torch.float8_e4m3fn


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def rows(counts):
    from trainer.kernels.moe import triton as moe
    from trainer.kernels.quantize import triton as quantize
    from trainer.kernels.rotary import triton as rotary

    found = []
    for count in counts:
        x = empty(count, 512)
        for layout in ("row", "column"):
            found += quantize.quant_act(x, layout=layout)
        found.append(quantize.dequant(empty(count, 512, dtype=E4M3), torch.empty(8, 4), x.dtype))
        found += moe.scale_by_router_weight(x, x, ints(count, 1), torch.empty(count, 1))
        found.append(moe.swiglu_backward(empty(count, 256), x))
        angles = torch.empty(count, 1, 32)
        found.append(rotary.rotary(empty(1, count, 8, 64), angles, angles, False))
    return found


def products(counts, is_tma):
    from trainer.kernels.grouped_gemm_fp8 import triton as fp8
    from trainer.kernels.moe import triton as moe

    w13, offs = empty(8, 512, 512), ints(8)
    w, w_scale = empty(8, 512, 512, dtype=E4M3), torch.empty(8, 4, 4)
    tilings = (moe.POINTERS, fp8.POINTERS)
    if is_tma:
        tilings = (moe.HOPPER_TMA, fp8.HOPPER_TMA)
    found = []
    for count in counts:
        x, x8 = empty(count, 512), empty(count, 512, dtype=E4M3)
        found += moe.moe_up_swiglu(x, w13, ints(count), offs, tiling=tilings[0])
        x_scale = torch.empty(4, count)
        found.append(fp8.grouped_mm_fp8(x8, x_scale, w, w_scale, offs, tiling=tilings[1]))
    return found


def launch_rows():
    rows(COUNTS)


def launch_products(is_tma):
    products(COUNTS, is_tma)


def most_compilations(found):
    names = [kernel.name for kernel in found]
    assert names
    return max(names.count(name) for name in names)


@pytest.mark.matrix
def test_operations_on_rows_are_compiled_twice_at_most():
    found = compiled(launch_rows)
    # Two layouts are two kernels.
    assert most_compilations([each for each in found if each.name != "_quant_act"]) <= 2
    assert len([each for each in found if each.name == "_quant_act"]) <= 4


@pytest.mark.matrix
@pytest.mark.parametrize("is_tma", [False, True])
def test_products_are_compiled_twice_at_most(is_tma):
    assert most_compilations(compiled(launch_products, is_tma)) <= 2


def shapes_without_tokens():
    from trainer.kernels.cross_entropy import triton as loss
    from trainer.kernels.rms_norm import triton as norm
    from trainer.kernels.swiglu import triton as activation

    x, weight, inverse = empty(0, 512), torch.empty(512), torch.empty(0)
    found = [*rows([0]), *products([0], False), *norm.forward(x, x, weight, 1e-5)]
    grad_x, grad_weight = norm.backward(x, x, x, weight, inverse)
    assert not grad_weight.any()
    found += [grad_x, activation.forward(x, x, None), *activation.backward(x, x, x, inverse)]
    found += loss.replace_by_gradient(x, torch.empty(0, dtype=torch.int64), 0.1)
    return [each.numel() for each in found]


def test_no_tokens_at_all():
    assert not any(interpreted(shapes_without_tokens))
