"""A test of the tests: what is around products too, with one mistake each, nearly all seen."""

import linecache
import tempfile
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from tests.kernels.child import ROOT, needs_triton
from tests.kernels.interpreted import interpreted
from tests.kernels.test_grouped_gemm_fp8 import check_product
from tests.kernels.test_moe import check_pieces, check_up
from tests.kernels.test_permute import check_triton

UP = [
    ("live = rm < end", "live = rm < end - 1"),
    ("token[:, None] * K", "rm[:, None] * K"),
    ("first = expert * 2 * I", "first = expert * I"),
    ("w.load([first + I,", "w.load([first + BLOCK_N,"),
    ("rows = expert.to(tl.int64) * 2 * I", "rows = expert.to(tl.int64) * I"),
    ("b_ptrs + tl.cast(I, tl.int64) * K", "b_ptrs + tl.cast(I, tl.int64)"),
    ("(rk < K - k * BLOCK_K)[None, :]", "(rk <= K - k * BLOCK_K)[None, :]"),
    ("& (rn < I)[None, :]\n        wide", "& (rn <= I)[None, :]\n        wide"),
    ("gate_up_ptrs + I, up", "gate_up_ptrs + I, gate"),
    ("gate * tl.sigmoid(gate) * up", "gate * tl.sigmoid(up) * up"),
    ("gate_up_ptr + wide * 2 * I", "gate_up_ptr + wide * I"),
    ("wide = rm.to(tl.int64)[:, None]", "wide = rm[:, None]"),
]
UP_CASES = [
    ([5, 0, 17, 33], 24, 40, torch.float32, False, 3, True),
    ([5, 0, 17, 33], 24, 40, torch.bfloat16, True, 3, True),
]
FP8 = [
    ("live = rm < end", "live = rm < end - 1"),
    ("* N + column * BLOCK\n        x_scale", "* N + column\n        x_scale"),
    ("* tiles_n + column) * steps", "* steps + column) * steps"),
    ("x_scale = x_scale_ptr + rm", "x_scale = x_scale_ptr + row + 0 * rm"),
    ("x_scale += M", "x_scale += K"),
    ("tl.load(w_scale + k)", "tl.load(w_scale)"),
    ("total += tl.dot", "total = tl.dot"),
    ("x.load([row, k * BLOCK])", "x.load([row, 0])"),
    ("w.load([weight_row.to(tl.int32), k * BLOCK])", "w.load([weight_row.to(tl.int32), 0])"),
    ("(k * BLOCK + rk)[None, :]", "(k + rk)[None, :]"),
    ("tl.where(expert < E, steps, 0)", "steps"),
    ("rm[:, None].to(tl.int64) * N", "rm[:, None] * N"),
]
FP8_CASES = [
    ([5, 0, 33], 2, *sizes, tma, 3, torch.float32)
    for sizes in ((128, 256), (256, 128))
    for tma in (False, True)
]
PERMUTE = [
    (
        "x_ptr + token * D + column, mask=column < D, other=0.0)\n    for",
        "x_ptr + column)\n    for",
    ),
    (
        "out_ptr + row * D + column, value, mask=column < D",
        "out_ptr + row * D + column, value, mask=column < D - 1",
    ),
    ("value = (x.to(tl.float32) * weight)", "value = (x.to(tl.float32) + weight)"),
    ("weight = tl.load(weight_ptr + token * A", "weight = tl.load(weight_ptr + token"),
    ("value *= tl.load(weight_ptr + token * A + choice)", "value *= tl.load(weight_ptr + row)"),
    ("total += value", "total = value"),
    ("out_ptr + token * D + column, total", "out_ptr + token * D + column + 1, total"),
    ("element_ty), mask=column < D)", "element_ty), mask=column < D - 1)"),
    ("column = first + tl.arange(0, COLUMNS)", "column = tl.arange(0, COLUMNS)"),
    ("total += x * y", "total = x * y"),
    ("out_ptr + token * A + choice, tl.sum", "out_ptr + token + choice, tl.sum"),
    (
        "choice).to(tl.int64)\n    total = tl.zeros((COLUMNS,)",
        "choice)\n    total = tl.zeros((COLUMNS,)",
    ),
]
PERMUTE_CASES = [
    ((5, 3, 7), torch.float32, True),
    ((5, 3, 7), torch.bfloat16, False),
    ((3, 2, 1030), torch.float32, True),
]
WEIGH = [
    ("live = choice < choices", "live = choice < choices - 1"),
    ("tl.program_id(0) * ROWS + tl.arange(0, ROWS)", "tl.program_id(0) + tl.arange(0, ROWS)"),
    ("weight_ptr + choice, mask=live", "weight_ptr + row, mask=live"),
    ("column = first + tl.arange(0, BLOCK)", "column = tl.arange(0, BLOCK)"),
    ("mask = live[:, None] & (column < I)", "mask = live[:, None] & (column < I - 1)"),
    ("offset = row[:, None] * I", "offset = choice[:, None] * I"),
    ("dots += tl.sum(grad * h", "dots = tl.sum(grad * h"),
    ("dots += tl.sum(grad * h", "dots += tl.sum(grad * grad"),
    ("offset, (grad * weight)", "offset, (h * weight)"),
    ("offset, (h * weight)", "offset, (grad * weight)"),
    ("grad_weight_ptr + choice, dots", "grad_weight_ptr + row, dots"),
    ("other=0).to(tl.int64)\n    weight", "other=0)\n    weight"),
]
WEIGH_CASES = [(torch.float32, 1100), (torch.bfloat16, 96)]


def survives(package, check, cases, old, new):
    """Return whether checks pass while a package's kernels have other text in one place."""
    parent = import_module(f"trainer.kernels.{package}")
    right = import_module(f"trainer.kernels.{package}.triton")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.py"
        path.write_text(Path(right.__file__).read_text().replace(old, new, 1))
        spec = spec_from_file_location(f"trainer.kernels.{package}.mutant", path)
        parent.triton = module_from_spec(spec)
        spec.loader.exec_module(parent.triton)
        linecache.getlines(str(path))  # the interpreter reads a kernel's text when it runs
        try:
            for case in cases:
                check(*case)
        except Exception:
            return False
        finally:
            parent.triton = right
    return True


@pytest.mark.matrix
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "check", "cases", "mistakes"),
    [
        ("moe", check_up, UP_CASES, UP),
        ("grouped_gemm_fp8", check_product, FP8_CASES, FP8),
        # The second half of a mixture is the grouped product and these.
        ("permute", check_triton, PERMUTE_CASES, PERMUTE),
        ("moe", check_pieces, WEIGH_CASES, WEIGH),
    ],
    ids=["up", "fp8", "permute", "scale_by_router_weight"],
)
def test_mistakes_in_a_kernel_are_seen(package, check, cases, mistakes):
    """One may survive: 32-bit offsets fail with 2^31 elements only."""
    text = (ROOT / "kernels" / package / "triton.py").read_text()
    assert [old for old, _ in mistakes if old not in text] == []
    assert len(mistakes) == 12
    assert interpreted(survives, package, check, cases, "", "")  # as they are, they pass
    unseen = [
        old for old, new in mistakes if interpreted(survives, package, check, cases, old, new)
    ]
    assert len(unseen) <= 1, unseen
    assert all("tl.int64" in old for old in unseen), unseen
