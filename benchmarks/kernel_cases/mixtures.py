"""What stands around the products of experts: plans, rows there and back, and fused halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases.case import Case, choices, each_routing
from torch import Tensor

from trainer.kernels.cvmm import op as cvmm
from trainer.kernels.moe import op as moe
from trainer.kernels.permute.op import permute, unpermute
from trainer.kernels.routing.op import routing_plan

SAMPLE = 64
"""rows that are compared with float64"""

# name: tokens, choices, width of an expert, of the model, experts
MIXTURES = {
    "dry": {"tiny": (24, 4, 128, 128, 4)},
    "quick": {"Qwen3-30B": (32768, 8, 768, 2048, 128)},
    "full": {
        "Qwen3-30B": (32768, 8, 768, 2048, 128),
        "DeepSeek-V3": (4096, 8, 2048, 7168, 8),
        "SigmaMoE": (16384, 8, 128, 1024, 128),
    },
}


def cases(suite: str, device: str) -> Iterator[Case]:
    """Yield what a layer of experts consists of."""
    for routing in each_routing():
        for name, sizes in MIXTURES[suite].items():
            yield from _routed(name, routing, device, *sizes)
            yield from _halves(name, routing, device, *sizes)


def _routed(
    name: str, routing: str, device: str, T: int, A: int, I: int, K: int, E: int
) -> Iterator[Case]:
    def chosen(seed: int) -> tuple[Any, ...]:
        return choices(routing, T, A, E, seed).to(device), E

    def rows(seed: int) -> tuple[Any, ...]:
        sel, _ = chosen(seed)
        generator = torch.Generator(device).manual_seed(seed)
        x, y = (
            torch.randn(count, K, generator=generator, device=device, dtype=torch.bfloat16)
            for count in (T, T * A)
        )
        weight = torch.rand(T, A, generator=generator, device=device)
        plan = routing_plan(sel, E)
        return x, y, weight, plan, plan.row_token.long(), plan.slot.flatten().long()

    def weighted(y: Tensor, weight: Tensor, slot: Tensor) -> Tensor:
        return (y[slot].view(T, A, K) * weight.unsqueeze(2)).sum(1)

    about: dict[str, Any] = {"routing": routing, "sizes": {"T": T, "A": A, "K": K, "E": E}}
    yield Case(
        "routing_plan",
        name,
        chosen,
        {"torch": _plan_by_sorting, "ours": lambda sel, E: routing_plan(sel, E).row_token},
        lambda sel, E: _plan_by_sorting(sel, E).double(),
        **about,
        bytes=(8.0 + 4 + 4) * T * A,
    )
    yield Case(
        "permute",
        name,
        rows,
        {
            "torch": lambda x, y, weight, plan, token, slot: x[token],
            "ours": lambda x, y, weight, plan, token, slot: permute(x, plan.slot),
        },
        lambda x, y, weight, plan, token, slot: x[token[:SAMPLE]].double(),
        **about,
        bytes=2.0 * K * (T + T * A),
    )
    yield Case(
        "unpermute",
        name,
        rows,
        {
            "torch": lambda x, y, weight, plan, token, slot: weighted(y, weight, slot),
            "ours": lambda x, y, weight, plan, token, slot: unpermute(y, plan.slot, weight),
        },
        lambda x, y, weight, plan, token, slot: (
            y[slot[: SAMPLE * A]].double().view(-1, A, K) * weight[:SAMPLE].double().unsqueeze(2)
        ).sum(1),
        **about,
        bytes=2.0 * K * (T + T * A),
    )


def _plan_by_sorting(sel: Tensor, experts: int) -> Tensor:
    """Return the token of each row; the counts that a plan also has are made as well."""
    flat = sel.flatten()
    torch.bincount(flat, minlength=experts).cumsum(0)
    order = flat.sort(stable=True).indices
    torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=sel.device))
    return order // sel.shape[1]


def _halves(
    name: str, routing: str, device: str, T: int, A: int, I: int, K: int, E: int
) -> Iterator[Case]:
    def inputs(seed: int) -> tuple[Any, ...]:
        sel = choices(routing, T, A, E, seed).to(device)
        generator = torch.Generator(device).manual_seed(seed)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        x, w13, w2 = numbers(T, K), numbers(E, 2 * I, K) / K**0.5, numbers(E, K, I) / I**0.5
        return x, w13, w2, numbers(T * A, I), numbers(T, A).abs(), sel, routing_plan(sel, E)

    def chain_up(x: Tensor, w13: Tensor, *others: Any) -> Tensor:
        gate_up = F.grouped_mm(permute(x, others[-1].slot), w13.mT, offs=others[-1].offs)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def chain_down(x: Tensor, w13: Tensor, w2: Tensor, h: Tensor, weight: Tensor, *others: Any):
        return unpermute(F.grouped_mm(h, w2.mT, offs=others[-1].offs), others[-1].slot, weight)

    def exact_up(x: Tensor, w13: Tensor, *others: Any) -> Tensor:
        plan = others[-1]
        sample = plan.row_token[: min(SAMPLE, int(plan.offs[0]))].long()
        gate, up = (x[sample].double() @ w13[0].double().T).chunk(2, dim=-1)
        return F.silu(gate) * up

    def exact_down(x: Tensor, w13: Tensor, w2: Tensor, h: Tensor, weight: Tensor, *others: Any):
        sel, plan = others
        rows = h[plan.slot[:SAMPLE].long()].double()
        parts = torch.stack([
            torch.stack([w2[e].double() @ row for e, row in zip(chosen, of_token, strict=True)])
            for chosen, of_token in zip(sel[:SAMPLE].tolist(), rows, strict=True)
        ])  # fmt: skip
        return (parts * weight[:SAMPLE].double().unsqueeze(2)).sum(1)

    def exact_cvmm(x: Tensor, w13: Tensor, w2: Tensor, *others: Any) -> Tensor:
        sel = others[-2][: SAMPLE // A]
        return torch.einsum("tk,taki->tai", x[: len(sel)].double(), w2[sel].double())

    def one_cvmm(act: cvmm.Activations) -> Any:
        return lambda x, w13, w2, h, weight, sel, plan: cvmm.cvmm(
            x, cvmm.cvmm_prepare_sel2(sel), w2, act=act
        )

    about: dict[str, Any] = {"routing": routing}
    about["sizes"] = {"T": T, "A": A, "I": I, "K": K, "E": E}
    yield Case(
        "moe_up_swiglu",
        name,
        inputs,
        {
            "torch's chain": chain_up,
            "ours": lambda x, w13, *others: moe.moe_up_swiglu(x, w13, others[-1]),
            "ours and the plan": lambda x, w13, *others: moe.moe_up_swiglu(
                x, w13, routing_plan(others[-2], E)
            ),
        },
        exact_up,
        **about,
        flops=4.0 * T * A * I * K,
    )
    yield Case(
        "moe_down_combine",
        name,
        inputs,
        {
            "torch's chain": chain_down,
            "ours": lambda x, w13, w2, h, weight, sel, plan: moe.moe_down_combine(
                h, w2, plan, weight
            ),
        },
        exact_down,
        **about,
        flops=2.0 * T * A * I * K,
    )
    yield Case(
        "cvmm",
        name,
        inputs,
        {"ours": one_cvmm("bf16"), "ours in fp8": one_cvmm("fp8")},
        exact_cvmm,
        **about,
        flops=2.0 * T * A * I * K,
    )
