"""A test of the tests: grouped products with one mistake each, nearly all of which must be seen."""

import linecache
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from tests.kernels.child import needs_triton
from tests.kernels.guarded import TOLERANCE
from tests.kernels.interpreted import interpreted
from tests.kernels.test_grouped_gemm import SMALL, dw_error, mm_error
from trainer.kernels.grouped_gemm import launch
from trainer.kernels.grouped_gemm.launch import Tiling

FOLDER = Path(launch.__file__).parent
SURVIVORS = 1

# Shared by both kernels of the product.
TILES = [
    ("tl.where(expert <= E, ends - starts, 0)", "tl.where(expert < E, ends - starts, 0)"),
    ("within = tile % per_group", "within = tile % tiles_n"),
    ("rows = tl.minimum(tiles_m - first, GROUP_M)", "rows = GROUP_M"),
    ("expert - 1, mask=expert > 0, other=0)", "expert - 1, mask=expert > 1, other=0)"),
    ("(entry & 0xFFFF) * BLOCK_M", "(entry & 0xFFFF) * BLOCK_M + 1"),
    ("mask=expert < E, other=M)\n    return", "mask=expert < E, other=0)\n    return"),
]
POINTERS = [
    *TILES,
    ("expert.to(tl.int64) * N * K", "expert.to(tl.int64) * N * N"),
    ("mask=b_mask", "mask=(rn < N)[None, :]"),
    ("a_mask = a_mask & (rk < K - k * BLOCK_K)", "a_mask = a_mask & (rk <= K - k * BLOCK_K)"),
    ("b_step = BLOCK_K * N", "b_step = BLOCK_K * K"),
    ("y_mask = (rm < end)[:, None]", "y_mask = (rm <= end)[:, None]"),
    ("x_ptr + rm[:, None].to(tl.int64) * K", "x_ptr + rm[:, None] * K"),
]
TMA = [
    *TILES,
    ("expert * (N if TRANS_W else K)", "expert * K"),
    ("w_row + k * BLOCK_K, n", "w_row + k * BLOCK_N, n"),
    ("far - end + row, column]", "far - row, column]"),
    ("y.store([far, end, ", "y.store([far, end + 1, "),
    ("row, end, n + half, right", "row, end, n, right"),
    ("left, right = tl.split", "right, left = tl.split"),
]
DW = [
    ("expert = tile // (tiles_n * tiles_k)", "expert = tile % E"),
    ("n = tile // tiles_k % tiles_n", "n = tile // tiles_n % tiles_n"),
    ("k = tile % tiles_k * BLOCK_K", "k = tile % tiles_n * BLOCK_K"),
    ("start = tl.load(offs_ptr + expert - 1", "start = tl.load(offs_ptr + expert"),
    ("range(start, end, BLOCK_M)", "range(start, end - 1, BLOCK_M)"),
    ("range(start, end, BLOCK_M)", "range(start, end, 2 * BLOCK_M)"),
    ("mask=(rm < end)[None, :] & (rn < N)", "mask=(rm < end + 1)[None, :] & (rn < N)"),
    ("mask=(rm < end)[:, None] & (rk < K)", "mask=(rm < end + 1)[:, None] & (rk < K)"),
    ("dw_ptr + expert.to(tl.int64) * N * K", "dw_ptr + expert.to(tl.int64) * N * N"),
    ("mask = (rn < N)[:, None] & (rk < K)", "mask = (rn < N)[:, None] & (rk <= K)"),
    ("total += tl.load", "total = tl.load"),
    ("x.load([far, end, far - end + row, k])", "x.load([far, end, far - end + row, n])"),
]


def mutant(name, old, new):
    """Return a copy of a module, and of the tiles that it imports, with other text in one place."""
    with tempfile.TemporaryDirectory() as folder:
        for original in ("triton_tiles", name):
            text = (FOLDER / f"{original}.py").read_text().replace(old, new)
            path = Path(folder) / f"{original}.py"
            path.write_text(text.replace("from .triton_tiles ", "from .triton_tiles_mutant "))
            spelled = f"trainer.kernels.grouped_gemm.{original}_mutant"
            spec = spec_from_file_location(spelled, path)
            module = sys.modules[spelled] = module_from_spec(spec)
            spec.loader.exec_module(module)
            linecache.getlines(str(path))  # the interpreter reads a kernel's text when it runs
    return module


def survives_mm(old, new, tma):
    module = mutant("triton", old, new)
    cases = [
        ([5, 0, 17, 33], 5, True, torch.bfloat16, tma),
        ([5, 0, 17, 33], 0, False, torch.float32, tma),
        ([150, 1], 0, True, torch.float16, False),
    ]
    for sizes, behind, trans_w, dtype, halves in cases:
        k = 64 if tma and not trans_w else 56
        tiling = Tiling(**SMALL, tma=tma, halves=halves)
        options = {"tiling": tiling, "programs": 3}
        error = mm_error(module.grouped_mm, sizes, 40, k, dtype, trans_w, behind, **options)
        if not error < TOLERANCE[dtype]:
            return False
    return True


def survives_dw(old, new, tma):
    module = mutant("triton_dw", old, new)
    for sizes, add in (([5, 0, 17, 33], False), ([16, 1], True)):
        options = {"tiling": Tiling(**SMALL, tma=tma), "programs": 3}
        case = (sizes, 40, 56, torch.bfloat16, torch.float32, add)
        if not dw_error(module, *case, **options) < 1e-6:
            return False
    return True


def is_seen(survives, old, new, tma):
    try:
        return not interpreted(survives, old, new, tma)
    except AssertionError:  # raised there, or the child died
        return True


@pytest.mark.matrix
@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("survives", "name", "mistakes", "tma"),
    [
        (survives_mm, "triton", POINTERS, [False]),
        (survives_mm, "triton", TMA, [True]),
        (survives_dw, "triton_dw", DW, [False, True]),
    ],
    ids=["pointers", "tma", "dw"],
)
def test_mistakes_in_a_kernel_are_seen(survives, name, mistakes, tma):
    """One may survive: 32-bit offsets fail with 2^31 elements only."""
    text = "".join((FOLDER / f"{each}.py").read_text() for each in (name, "triton_tiles"))
    assert [old for old, _ in mistakes if old not in text] == []
    assert len(mistakes) == 12
    for each in tma:  # as they are, the kernels pass
        assert interpreted(survives, "", "", each)
    unseen = [old for old, new in mistakes if not any(is_seen(survives, old, new, e) for e in tma)]
    assert len(unseen) <= SURVIVORS, unseen
    assert all("tl.int64" in old for old in unseen), unseen
