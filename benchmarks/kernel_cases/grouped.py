"""Products of groups of rows, plain and in fp8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import Case, compiled, each_routing, ends
from torch import Tensor

from trainer.kernels.grouped_gemm import launch
from trainer.kernels.grouped_gemm import op as grouped_gemm
from trainer.kernels.grouped_gemm_fp8 import op as fp8
from trainer.kernels.quantize.op import quant_act, quant_weight
from trainer.kernels.quantize.reference import LARGEST, LEAST

SAMPLE = 64
"""rows that are compared with float64"""

# name: rows, columns of the weight, its rows, experts
SHAPES = {
    "dry": {"tiny": (96, 128, 128, 4)},
    "quick": {
        "DeepSeek-V3 up": (32768, 4096, 7168, 8),
        "Qwen3-30B up": (262144, 1536, 2048, 128),
    },
    "full": {
        "DeepSeek-V3 up": (32768, 4096, 7168, 8),
        "DeepSeek-V3 down": (32768, 7168, 2048, 8),
        "Qwen3-30B up": (262144, 1536, 2048, 128),
        "Qwen3-30B down": (262144, 2048, 768, 128),
        "small": (4096, 2048, 2048, 16),
        "SigmaMoE": (131072, 128, 1024, 128),
    },
}


def cases(suite: str, device: str) -> Iterator[Case]:
    """Yield the products of a suite."""
    for routing in each_routing():
        for name, (M, N, K, E) in SHAPES[suite].items():
            yield from _products(name, routing, device, M, N, K, E)


def _products(
    name: str, routing: str, device: str, M: int, N: int, K: int, E: int
) -> Iterator[Case]:
    def rows(seed: int, *shape: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def forward(seed: int) -> tuple[Any, ...]:
        host = ends(routing, M, E, seed)
        offs = torch.tensor(host, dtype=torch.int32, device=device)
        return rows(2 * seed, M, K), rows(2 * seed + 1, E, N, K) / K**0.5, offs, host

    def weights(seed: int) -> tuple[Any, ...]:
        _, _, offs, host = forward(seed)
        return rows(2 * seed, M, N), rows(2 * seed + 1, M, K), offs, host

    def quantised(seed: int) -> tuple[Any, ...]:
        x, w, offs, host = forward(seed)
        by_rows = *_by_rows(x), *_by_rows(w)
        return *quant_act(x), *quant_weight(w), x, w, offs, host, *by_rows

    sizes = {"M": M, "N": N, "K": K, "E": E}
    about: dict[str, Any] = {"routing": routing, "flops": 2.0 * M * N * K, "sizes": sizes}
    plain = lambda x, w, offs, host: F.grouped_mm(x, w.mT, offs=offs)  # noqa: E731
    tuned = compiled(plain, device, "max-autotune-no-cudagraphs")
    yield Case(
        "grouped_mm",
        name,
        forward,
        {
            "dense": lambda x, w, offs, host: x @ w[0].T,
            "torch": plain,
            "torch, max-autotune": lambda x, w, offs, host: tuned(x, w, offs, None),
            "loop": _loop,
            "ours": lambda x, w, offs, host: grouped_gemm.grouped_mm(x, w, offs),
            "ours, pointers": _tiled(launch.POINTERS),
        },
        _exact,
        **about,
    )
    yield Case(
        "grouped_dw",
        name,
        weights,
        {
            "dense": lambda dy, x, offs, host: dy.T @ x,
            "torch": lambda dy, x, offs, host: F.grouped_mm(dy.mT, x, offs=offs),
            "loop": lambda dy, x, offs, host: torch.stack(
                [dy[a:b].T @ x[a:b] for a, b in pairwise([0, *host])]
            ),
            "ours": lambda dy, x, offs, host: grouped_gemm.grouped_dw(dy, x, offs),
        },
        lambda dy, x, offs, host: (dy[: host[0]].double().T @ x[: host[0]].double()).unsqueeze(0),
        **about,
        exact_dense=lambda dy, x, offs, host: dy[:, :SAMPLE].double().T @ x.double(),
    )
    yield Case(
        "grouped_mm_fp8",
        name,
        quantised,
        {
            "dense": lambda *a: torch._scaled_mm(
                a[8], a[10][0].T, a[9], a[11][0].T, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            "dense in bf16": lambda *a: a[4] @ a[5][0].T,
            "torch, scales of rows": lambda *a: torch._scaled_grouped_mm(
                a[8],
                a[10].mT,
                a[9].squeeze(1),
                a[11].squeeze(2),
                offs=a[6],
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            ),
            "ours in bf16": lambda *a: grouped_gemm.grouped_mm(*a[4:7]),
            "ours": lambda *a: fp8.grouped_mm_fp8(*a[:4], a[6]),
            "ours and quantising": lambda *a: fp8.grouped_linear_fp8(*a[4:7]),
        },
        lambda *a: _exact(*a[4:8]),
        **about,
        bound="dense_fp8_tflops",
    )


def _by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 and a scale a row, as torch's fp8 products want them."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=LEAST) / LARGEST
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def _tiled(tiling: launch.Tiling) -> Callable[..., Tensor]:
    """Return our product with one tiling; in a dry run the reference."""

    def call(x: Tensor, w: Tensor, offs: Tensor, host: list[int]) -> Tensor:
        if not x.is_cuda:
            return grouped_gemm.grouped_mm(x, w, offs)
        from trainer.kernels.grouped_gemm import triton

        return triton.grouped_mm(x, w, offs, tiling=tiling)

    return call


def _loop(x: Tensor, w: Tensor, offs: Tensor, host: list[int]) -> Tensor:
    return torch.cat(
        [x[a:b] @ each.T for each, (a, b) in zip(w, pairwise([0, *host]), strict=True)]
    )


def _exact(x: Tensor, w: Tensor, offs: Tensor, host: list[int]) -> Tensor:
    sample = min(SAMPLE, host[0])
    return x[:sample].double() @ w[0].double().T
