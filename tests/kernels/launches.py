"""What is compiled for GPUs that are not there: each wrapper with its defaults, at real sizes."""

from __future__ import annotations

import torch

from tests.kernels.launches_fused import FUSED

ROWS, WIDTH, INNER, EXPERTS = 4096, 2048, 1024, 8
ODD = INNER + 1  # rows that start at any byte
UNEVEN = INNER + 8  # no multiple of a tile


def rows(width: int, dtype: torch.dtype = torch.bfloat16, count: int = ROWS) -> torch.Tensor:
    return torch.empty(count, width, dtype=dtype)


def offs() -> torch.Tensor:
    return torch.empty(EXPERTS, dtype=torch.int32)


def weight(trans_w: bool, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(EXPERTS, *((WIDTH, INNER) if trans_w else (INNER, WIDTH)), dtype=dtype)


def grouped_mm(trans_w: bool, counts: tuple[int, ...] = (ROWS,)) -> None:
    from trainer.kernels.grouped_gemm import triton

    for count in counts:
        triton.grouped_mm(rows(INNER, count=count), weight(trans_w), offs(), trans_w=trans_w)


def grouped_mm_of_rows(k: int, trans_w: bool, out_dtype: torch.dtype | None = None) -> None:
    from trainer.kernels.grouped_gemm import triton

    w = torch.empty(EXPERTS, *((WIDTH, k) if trans_w else (k, WIDTH)), dtype=torch.bfloat16)
    triton.grouped_mm(rows(k), w, offs(), trans_w=trans_w, out_dtype=out_dtype)


def grouped_mm_of_columns(columns: int, trans_w: bool) -> None:
    from trainer.kernels.grouped_gemm import triton

    shape = (columns, INNER) if trans_w else (INNER, columns)
    w = torch.empty(EXPERTS, *shape, dtype=torch.bfloat16)
    triton.grouped_mm(rows(INNER), w, offs(), trans_w=trans_w)


def grouped_mm_fp32() -> None:
    from trainer.kernels.grouped_gemm import triton

    triton.grouped_mm(rows(INNER, torch.float32), weight(True, torch.float32), offs())


def grouped_dw(counts: tuple[int, ...] = (ROWS,)) -> None:
    from trainer.kernels.grouped_gemm import triton_dw

    for count in counts:
        triton_dw.grouped_dw(rows(WIDTH, count=count), rows(INNER, count=count), offs())


def add_grouped_dw() -> None:
    from trainer.kernels.grouped_gemm import triton_dw

    total = torch.empty(EXPERTS, WIDTH, INNER)
    triton_dw.add_grouped_dw(total, rows(WIDTH), rows(INNER), offs())


def grouped_dw_fp32() -> None:
    from trainer.kernels.grouped_gemm import triton_dw

    triton_dw.grouped_dw(rows(WIDTH, torch.float32), rows(INNER, torch.float32), offs())


def grouped_dw_odd() -> None:
    from trainer.kernels.grouped_gemm import triton_dw

    triton_dw.grouped_dw(rows(WIDTH), rows(ODD), offs())


def routing_plan() -> None:
    from trainer.kernels.routing import triton

    triton.routing_plan(torch.empty(ROWS, 8, dtype=torch.int32), 128)


def permute() -> None:
    from trainer.kernels.permute import triton

    slot, weights = torch.empty(ROWS, 8, dtype=torch.int32), torch.empty(ROWS, 8)
    triton.permute(rows(WIDTH), slot, weights)
    triton.unpermute(rows(WIDTH, count=8 * ROWS), slot, weights)
    triton.row_dots(rows(WIDTH), rows(WIDTH, count=8 * ROWS), slot)


EVERYWHERE, SINCE_HOPPER, HOPPER = (80, 90, 100), (90, 100), (90,)

LAUNCHES = {
    "grouped_mm": (grouped_mm, (True,), EVERYWHERE),
    "grouped_mm, dx": (grouped_mm, (False,), EVERYWHERE),
    "grouped_mm, odd rows": (grouped_mm_of_rows, (ODD, True), EVERYWHERE),
    "grouped_mm, odd rows, dx": (grouped_mm_of_rows, (ODD, False), EVERYWHERE),
    "grouped_mm, uneven tiles, dx": (grouped_mm_of_rows, (UNEVEN, False), EVERYWHERE),
    "grouped_mm, wide": (grouped_mm_of_rows, (INNER, True, torch.float32), EVERYWHERE),
    "grouped_mm, wide, dx": (grouped_mm_of_rows, (INNER, False, torch.float32), EVERYWHERE),
    "grouped_mm, 128 columns": (grouped_mm_of_columns, (128, True), EVERYWHERE),
    "grouped_mm, 128 columns, dx": (grouped_mm_of_columns, (128, False), EVERYWHERE),
    "grouped_mm, 64 columns": (grouped_mm_of_columns, (64, True), EVERYWHERE),
    "grouped_mm, 64 columns, dx": (grouped_mm_of_columns, (64, False), EVERYWHERE),
    "grouped_mm, fp32": (grouped_mm_fp32, (), EVERYWHERE),
    "grouped_dw": (grouped_dw, (), EVERYWHERE),
    "grouped_dw, added": (add_grouped_dw, (), EVERYWHERE),
    "grouped_dw, odd rows": (grouped_dw_odd, (), EVERYWHERE),
    "grouped_dw, fp32": (grouped_dw_fp32, (), EVERYWHERE),
    "routing_plan": (routing_plan, (), EVERYWHERE),
    "permute": (permute, (), EVERYWHERE),
    **FUSED,
}
"""name -> (what launches, its arguments, the compute capabilities that it is for)"""
PRODUCTS = ("grouped_mm", "grouped_dw")
WITH_TMA = {
    "grouped_mm",
    "grouped_mm, dx",
    "grouped_dw",
    "grouped_dw, added",
    *(name for name in LAUNCHES if "columns" in name),
}
