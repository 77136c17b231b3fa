"""Grouped products against float64, a group at a time."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import also
from tests.kernels.child import needs_triton
from tests.kernels.guarded import TOLERANCE, group_sizes, guards, relative_error, surrounded
from tests.kernels.interpreted import interpreted
from trainer.kernels.grouped_gemm import launch, op, reference, rounded
from trainer.kernels.grouped_gemm.launch import Tiling

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
QUICK_DTYPES = [torch.bfloat16, *also(torch.float32, torch.float16)]
SMALL = {"block_m": 16, "block_n": 32, "block_k": 16, "warps": 4, "stages": 3}
TILINGS = {
    "pointers": Tiling(**SMALL),
    "tma": Tiling(**SMALL, tma=True),
    "halves": Tiling(**SMALL, tma=True, halves=True),
}
PROGRAMS = itertools.cycle([1, 3, 1000])


def inputs(sizes, n, k, dtype=torch.float64, trans_w=True, behind=0):
    """Return x, w, dy and offs; some rows behind the last group belong to none and are NaN."""
    torch.manual_seed(0)
    rows = sum(sizes) + behind
    x, dy = torch.randn(rows, k), torch.randn(rows, n)
    w = torch.randn(len(sizes), *((n, k) if trans_w else (k, n))) / k**0.5
    offs = torch.tensor(sizes).cumsum(0).int()
    x[sum(sizes) :], dy[sum(sizes) :] = float("nan"), float("nan")
    return x.to(dtype), w.to(dtype), dy.to(dtype), offs


def exact_mm(x, w, offs, trans_w):
    y = torch.zeros(len(x), w.shape[1 if trans_w else 2], dtype=torch.float64)
    for start, end, weight in zip([0, *offs.tolist()], offs.tolist(), w.double(), strict=False):
        y[start:end] = x[start:end].double() @ (weight.T if trans_w else weight)
    return y


def exact_dw(dy, x, offs):
    dw = torch.zeros(len(offs), dy.shape[1], x.shape[1], dtype=torch.float64)
    for e, (start, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
        dw[e] = dy[start:end].double().T @ x[start:end].double()
    return dw


def mm_error(grouped_mm, sizes, n, k, dtype, trans_w, behind, out_dtype=None, **options):
    x, w, _, offs = (surrounded(v) for v in inputs(sizes, n, k, dtype, trans_w, behind))
    with guards():
        y = grouped_mm(x, w, offs, trans_w=trans_w, out_dtype=out_dtype, **options)
    assert y.dtype == (out_dtype or dtype)
    assert not y[len(y) - behind :].any()
    return relative_error(y, exact_mm(x, w, offs, trans_w))


def dw_error(module, sizes, n, k, dtype, out_dtype, add, **options):
    x, _, dy, offs = (surrounded(v) for v in inputs(sizes, n, k, dtype, behind=3))
    exact = exact_dw(dy, x, offs)
    if add:
        total = surrounded(torch.randn(exact.shape).to(out_dtype))
        exact += total.double()
        module.add_grouped_dw(total, dy, x, offs, **options)
    else:
        with guards():
            total = module.grouped_dw(dy, x, offs, out_dtype=out_dtype, **options)
    assert total.dtype == out_dtype
    return relative_error(total, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans_w", [True, False])
@pytest.mark.parametrize("sizes", group_sizes(16), ids=str)
def test_the_reference_multiplies_each_group(sizes, trans_w, dtype):
    error = mm_error(reference.grouped_mm, sizes, 40, 56, dtype, trans_w, 5)
    assert error < TOLERANCE[dtype]
    wide = mm_error(reference.grouped_mm, sizes, 40, 56, dtype, trans_w, 5, torch.float32)
    assert wide < TOLERANCE[torch.float32]
    assert dw_error(reference, sizes, 40, 56, dtype, torch.float32, True) < 1e-6
    assert dw_error(reference, sizes, 40, 56, dtype, dtype, False) < TOLERANCE[dtype]


ROUNDED_SIZES = [*group_sizes(32), [1, 0, 300, 70], [257, 40, 0, 33, 5], [2, 3], [0, 0]]


@pytest.mark.parametrize("sizes", ROUNDED_SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_lengths_of_groups_are_rounded_up(dtype, sizes):
    for trans_w, behind in ((True, 0), (False, 5), (True, 100)):
        assert mm_error(op.grouped_mm, sizes, 40, 56, dtype, trans_w, behind) < TOLERANCE[dtype]
    for n, k in ((40, 56), (56, 40)):  # either factor can be the narrower
        assert dw_error(op, sizes, n, k, dtype, dtype, False) < TOLERANCE[dtype]


def test_groups_of_all_lengths_are_products_of_few_shapes():
    shapes = set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is torch.ops.aten.mm:
                shapes.add(tuple(tuple(arg.shape) for arg in args[:2]))
            return function(*args, **(kwargs or {}))

    x, w, dy, offs = inputs([*range(1, 400), 1000], 8, 16, torch.bfloat16)
    with Shapes():
        rounded.grouped_mm(x, w.mT, offs)
        rounded.grouped_dw(dy, x, offs)
    assert 2 < len(shapes) <= 2 * 16  # 8 lengths up to 256, and 4 in each octave above


def worst_mm(name, dtype, trans_w, out_dtype):
    from trainer.kernels.grouped_gemm import triton

    # Tiles of untransposed weights may not reach into the next expert's.
    k = 56 if trans_w or name == "pointers" else 64
    worst = 0.0
    sizes_of_groups = [*group_sizes(16), [150, 0, 1]]  # more tiles than share a weight's columns
    for sizes, behind in zip(sizes_of_groups, itertools.cycle([0, 5, 40]), strict=False):
        options = {"tiling": TILINGS[name], "programs": next(PROGRAMS)}
        case = (sizes, 40, k, dtype, trans_w, behind, out_dtype)
        error = mm_error(triton.grouped_mm, *case, **options)
        assert error < TOLERANCE[out_dtype or dtype], (case, options, error)
        worst = max(worst, error)
    return worst


@needs_triton
@pytest.mark.parametrize("dtype", QUICK_DTYPES)
@pytest.mark.parametrize("trans_w", [True, *also(False)])
@pytest.mark.parametrize("name", TILINGS)
def test_triton_multiplies_each_group(name, trans_w, dtype):
    assert 0 < interpreted(worst_mm, name, dtype, trans_w, None) < TOLERANCE[dtype]


@needs_triton
def test_a_result_can_be_wider_than_its_operands():
    assert interpreted(worst_mm, "pointers", torch.bfloat16, True, torch.float32) < 1e-6


COLUMNS = {
    # (compute capability, N, K) -> columns of a tile
    (90, 64, 2048): 64,
    (90, 128, 2048): 128,
    (90, 192, 2048): 64,
    (90, 256, 2048): 256,
    (90, 384, 2048): 128,
    (90, 1408, 2048): 128,
    (90, 2048, 2048): 256,
    (90, 2048, 512): 128,
    (100, 128, 2048): 128,
    (80, 64, 2048): 64,
    (80, 192, 2048): 64,
    (80, 2048, 512): 128,
}


@pytest.mark.parametrize(("shape", "columns"), COLUMNS.items(), ids=str)
def test_tiles_are_as_wide_as_the_weights_fill_them(shape, columns):
    arch, N, K = shape
    x, w, y = (torch.empty(8, *sizes, dtype=torch.bfloat16) for sizes in ((K,), (N, K), (N,)))
    tiling = launch.mm_tiling(arch, x, w, y, trans_w=True)
    assert tiling.block_n == columns
    # At most two stay on a multiprocessor, with what else it keeps of its 228 KiB.
    stage = 2 * tiling.block_k * (tiling.block_m + tiling.block_n)
    assert tiling.per_processor * tiling.stages * stage <= 227 * 1024


def columns_of_every_width(N):
    from trainer.kernels.grouped_gemm import triton

    for tiling in (launch.TMA, launch.TMA_HALF, launch.TMA_QUARTER, launch.POINTERS_HALF):
        options = {"tiling": tiling, "programs": 2}
        case = ([5, 0, 130], N, 64, torch.bfloat16, True, 3)
        error = mm_error(triton.grouped_mm, *case, **options)
        assert error < TOLERANCE[torch.bfloat16], (N, tiling)


@needs_triton
@pytest.mark.parametrize("N", [64, 192, *also(128, 256, 320)])
def test_tiles_of_every_width_multiply_any_number_of_columns(N):
    interpreted(columns_of_every_width, N)


def worst_dw(tma, dtype, out_dtype, add):
    from trainer.kernels.grouped_gemm import triton_dw

    worst = 0.0
    for sizes in group_sizes(16):
        options = {"tiling": Tiling(**SMALL, tma=tma), "programs": next(PROGRAMS)}
        error = dw_error(triton_dw, sizes, 40, 56, dtype, out_dtype, add, **options)
        assert error < TOLERANCE[out_dtype], (sizes, options, error)
        worst = max(worst, error)
    return worst


@needs_triton
@pytest.mark.parametrize("dtype", QUICK_DTYPES)
@pytest.mark.parametrize(
    ("tma", "add"), [(True, True), *also((True, False), (False, False), (False, True))]
)
def test_triton_sums_each_groups_weight_gradient(tma, dtype, add):
    assert 0 < interpreted(worst_dw, tma, dtype, torch.float32, add) < 1e-6
    if dtype != torch.float32:
        assert 0 < interpreted(worst_dw, tma, dtype, dtype, add) < TOLERANCE[dtype]


def edges():
    from trainer.kernels.grouped_gemm import triton, triton_dw

    options = {"tiling": TILINGS["tma"], "programs": 2}
    x, w, dy, offs = inputs([0, 0], 32, 64, torch.bfloat16)
    no_rows = triton.grouped_mm(x, w, offs, **options)
    no_rows_dw = triton_dw.grouped_dw(dy, x, offs, **options)
    return no_rows.shape, no_rows_dw.shape, no_rows_dw.any().item()


@needs_triton
def test_no_rows_at_all():
    assert interpreted(edges) == ((0, 32), (2, 32, 64), False)


@needs_triton
def test_a_tile_that_reaches_into_the_next_weight_is_refused():
    with pytest.raises(AssertionError, match="weights of 40 rows in tiles of 16"):
        interpreted(reach_into_the_next)


def reach_into_the_next():
    from trainer.kernels.grouped_gemm import triton

    x, w, _, offs = inputs([2, 3], 32, 40, torch.bfloat16, trans_w=False)
    triton.grouped_mm(x, w, offs, trans_w=False, tiling=TILINGS["tma"], programs=1)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_splitting_a_group_and_permuting_its_rows_change_nothing(sizes, data):
    x, w, dy, offs = inputs(sizes, 3, 4)
    whole = op.grouped_mm(x, w, offs)
    group = data.draw(st.integers(0, len(sizes) - 1))
    start = sum(sizes[:group])
    cut = start + data.draw(st.integers(0, sizes[group]))
    more = torch.tensor(sorted([*offs.tolist(), cut])).int()
    index = torch.tensor([*range(group + 1), *range(group, len(sizes))])
    torch.testing.assert_close(op.grouped_mm(x, w[index], more), whole)

    order = torch.arange(len(x))
    order[start : start + sizes[group]] = start + torch.randperm(sizes[group])
    torch.testing.assert_close(op.grouped_mm(x[order], w, offs), whole[order])

    dw = op.grouped_dw(dy, x, offs, out_dtype=torch.float64)
    torch.testing.assert_close(dw.sum(0), dy.T @ x)
    one = torch.tensor([len(x)]).int()
    torch.testing.assert_close(op.grouped_mm(x, w[:1], one), x @ w[0].T)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
@pytest.mark.parametrize("sizes", [[2, 0, 3], [2, 2, 2]])
@pytest.mark.parametrize("trans_w", [True, False])
def test_gradients(check, sizes, trans_w):
    x, w, dy, offs = inputs(sizes, 3, 4, trans_w=trans_w)
    for value in (x, w, dy):
        value.requires_grad_()
    assert check(lambda x, w: op.grouped_mm(x, w, offs, trans_w=trans_w), (x, w))
    assert check(lambda dy, x: op.grouped_dw(dy, x, offs, out_dtype=torch.float64), (dy, x))
    assert check(lambda x, w: reference.grouped_mm(x, w, offs, trans_w=trans_w), (x, w))


@pytest.mark.parametrize("dtype", [torch.float32, *also(torch.bfloat16)])
def test_they_are_operations_that_compile(dtype):
    x, w, dy, offs = inputs([2, 0, 3], 3, 4, dtype)
    for value in (x, w):
        value.requires_grad_()
    torch.library.opcheck(op._grouped_mm, (x, w, offs, True, dtype))
    torch.library.opcheck(op._grouped_dw, (dy, x, offs, torch.float32))
    torch.library.opcheck(op.add_grouped_dw, (torch.zeros(3, 3, 4), dy, x.detach(), offs))

    def loss(x, w):
        return op.grouped_mm(x, w, offs).square().sum()

    eager = torch.autograd.grad(loss(x, w), (x, w))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    fused = torch.autograd.grad(compiled(x, w), (x, w))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(fused, eager, **tolerance)


def test_mixed_dtypes_are_refused():
    x, w, _, offs = (value.to("meta") for value in inputs([2, 3], 3, 4, torch.float32))
    with pytest.raises(TypeError, match=r"weights torch\.bfloat16"):
        op.grouped_mm(x, w.bfloat16(), offs)
