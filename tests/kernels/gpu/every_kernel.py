"""Launch every kernel once or more, at sizes that fill no tile: what a sanitizer watches.

    compute-sanitizer --tool memcheck python -m tests.kernels.gpu.every_kernel

With the word `wrong` one kernel writes outside of its tensor, which must be seen.
"""

import sys

import torch

from tests.kernels.test_moe import choices, layer, run
from trainer.kernels.cross_entropy.op import linear_cross_entropy
from trainer.kernels.cvmm.op import cvmm, cvmm_prepare_sel2
from trainer.kernels.grouped_gemm import op
from trainer.kernels.permute.op import row_dots
from trainer.kernels.quantize.op import dequant, quant_act, quant_weight
from trainer.kernels.rms_norm.op import add_rms_norm, rms_norm
from trainer.kernels.rotary.op import rotary
from trainer.kernels.routing.op import routing_plan
from trainer.kernels.swiglu.op import swiglu

SIZES = [5, 0, 131, 34]
SHAPES = [(33, 65), (136, 264), (128, 256)]  # the width of an expert and of the model


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype).requires_grad_()


def back(*outputs):
    sum(out.float().square().sum() for out in outputs).backward()


def experts(I, K, dtype):  # noqa: E741
    sel = choices(SIZES)
    inputs = [each.detach().requires_grad_() for each in layer(sel, len(SIZES), I, K, dtype)]
    back(run(*inputs, sel))
    x, w13, _, _ = inputs
    plan = routing_plan(sel, len(SIZES))
    rows = numbers(sel.numel(), K, dtype=dtype)
    back(row_dots(x, rows, plan.slot), cvmm(x, cvmm_prepare_sel2(sel), w13.mT))
    rows, w13 = rows.detach(), w13.detach()
    op.add_grouped_dw(torch.zeros_like(w13), rows @ w13[0].T, rows, plan.offs)


def fp8():
    x, keys = numbers(85, 256), numbers(len(SIZES), 256, 128)
    back(cvmm(x, cvmm_prepare_sel2(choices(SIZES)), keys, act="fp8"))
    quant_act(x.detach(), layout="both")
    q, scale, *_ = quant_weight(numbers(2, 130, 201).detach(), layout="both")
    dequant(q[0], scale[0], torch.float32)


def rows_of(D, dtype):
    x, residual, weight = numbers(7, D, dtype=dtype), numbers(7, D, dtype=dtype), numbers(D)
    back(*add_rms_norm(x, residual, weight, 1e-5), rms_norm(x, weight, 1e-5))
    back(swiglu(x, residual), swiglu(x, residual, numbers(7)))
    heads, angles = numbers(2, 7, 3, 2 * D, dtype=dtype), torch.rand(7, 1, D)
    back(rotary(heads, angles.cos(), angles.sin()))
    labels = torch.tensor([1, -100, 3, 0, 2, 1, D - 1])
    back(linear_cross_entropy(x, numbers(D, D, dtype=dtype), labels))


def everything():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for I, K in SHAPES:  # noqa: E741
            experts(I, K, dtype)
        for D in (5, 130, 4099):
            rows_of(D, dtype)
    fp8()


def wrong():
    from tests.kernels.sample_kernels import copy

    copy[(1,)](torch.ones(128), torch.empty(64), 128)


if __name__ == "__main__":
    torch.set_default_device("cuda")
    wrong() if "wrong" in sys.argv else everything()
    torch.cuda.synchronize()
