"""Feed-forward layers that each compute the tokens routed to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ...kernels.routing.reference import RoutingPlan
from ..matrices import DOWN, UP
from .configs import MoESettings
from .dense import Adapted


class TokenExchange:
    """Where the tokens of a layer go to be computed: they stay here, where no ranks share experts.

    An engine that divides the experts over ranks gives `Experts.exchange` a subclass.
    """

    def dispatch(self, rows: Tensor, weight: Tensor, offs: Tensor) -> tuple[Any, ...]:
        """Start sending tokens to their experts; return the arguments of `compute`.

        Work issued between the two, such as the shared expert, overlaps with the exchange, in the
        backward pass too.

        Args:
            rows: token activations sorted by expert, [M, D].
            weight: the router's weight of each token, [M].
            offs: exclusive end of each expert's tokens in `rows`, int32 [E].
        """
        return rows, weight, offs

    def compute(self, experts: Callable[[Tensor, Tensor, Tensor], Tensor], *sent: Any) -> Tensor:
        """Return the outputs of `experts` for the tokens that `dispatch` sent, [M, D].

        Args:
            experts: computes rows, weights and offsets as `Experts.compute`.
            sent: what `dispatch` returned.
        """
        return experts(*sent)


class Experts(Adapted):
    """SwiGLU feed-forward layers that compute rows sorted by expert.

    An adapter beside a stack of matrices has A [E, rank, in] and B [E, ..., rank]: one of its own
    for each expert. Gate and up have A in common, as PEFT's adapters do.

    Args:
        dim: D.
        settings: of the layer.
        kernels: the implementations.

    Attributes:
        exchange: sends tokens to the experts and outputs back.
    """

    matrices: ClassVar[tuple[str, ...]] = ("gate_up", "down")

    def __init__(self, dim: int, settings: MoESettings, kernels: Kernels) -> None:
        super().__init__()
        experts, ffn_dim = settings.num_experts, settings.expert_ffn_dim
        self.gate_up = nn.Parameter(torch.empty(experts, 2, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn_dim))
        nn.init.normal_(self.gate_up, std=dim**-0.5)
        nn.init.normal_(self.down, std=ffn_dim**-0.5)
        self.product = self.adapter_product = kernels.grouped_gemm
        self.activation = kernels.swiglu
        self.exchange = TokenExchange()

    def forward(self, *sent: Any) -> Tensor:
        """Return the outputs for the tokens that `exchange.dispatch` sent, [M, D].

        The exchange ends in here, so that sharded weights are gathered while it waits.
        """
        return self.exchange.compute(self.compute, *sent)

    def compute(self, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return each row as its expert makes it, times its weight.

        A row's weight multiplies what enters the last product: the same, over fewer columns.

        Args:
            rows: [M, D], sorted by expert.
            weight: [M].
            offs: int32 [E], where each expert's rows end.
        """
        gate_up_MF = self.multiply("gate_up", rows, offs)
        gate_MF, up_MF = gate_up_MF.chunk(2, dim=-1)
        hidden_MF = self.activation(gate_MF, up_MF, weight)
        return self.multiply("down", hidden_MF, offs)

    def multiply(self, key: str, rows: Tensor, offs: Tensor) -> Tensor:
        """Return each row times its expert's matrix, with the adapter's part if there is one.

        Args:
            key: "gate_up" or "down".
            rows: [M, in], sorted by expert.
            offs: int32 [E], where each expert's rows end.

        Returns:
            [M, out]; of "gate_up" all of gate, then all of up.
        """
        out = self.product(rows, self._matrices(key, rows.dtype), offs)
        name = f"{key}_{DOWN}"
        if not self.scale or name not in self._parameters:
            return out
        narrow = self.adapter_product(rows, self._matrices(name, rows.dtype), offs)
        up = self._matrices(f"{key}_{UP}", rows.dtype)
        return out + self.adapter_product(narrow * self.scale, up, offs)

    def _matrices(self, key: str, dtype: torch.dtype) -> Tensor:
        """Return a stack [E, ..., out, in] as [E, out, in]."""
        return self.local(key).to(dtype).flatten(1, -2)

    def with_adapter(
        self, key: str, rank: int, scale: float, *, dropout: float = 0.0, dora: bool = False
    ) -> Experts:
        """Put an adapter beside a stack of matrices; return the layer itself."""
        if dropout or dora:
            raise ValueError("adapters of experts have neither dropout nor DoRA")
        experts, *rows, columns = getattr(self, key).shape
        self.register_parameter(f"{key}_{DOWN}", nn.Parameter(torch.empty(experts, rank, columns)))
        self.register_parameter(f"{key}_{UP}", nn.Parameter(torch.empty(experts, *rows, rank)))
        self.scale = scale
        return self

    def replace_adapted(self, key: str, weight: Tensor) -> None:
        """Replace a stack of matrices, and drop the adapter beside it."""
        self.register_parameter(key, nn.Parameter(weight))
        for name in (f"{key}_{DOWN}", f"{key}_{UP}"):
            del self._parameters[name]


class FusedExperts(Experts):
    """SwiGLU feed-forward layers that read tokens where they are, and add up their outputs.

    Args:
        fused: see `kernels.moe.layer.fused_experts`.
    """

    def __init__(
        self, dim: int, settings: MoESettings, kernels: Kernels, fused: Callable[..., Tensor]
    ) -> None:
        super().__init__(dim, settings, kernels)
        self.fused = fused

    def compute(self, rows: Tensor, weight: Tensor, plan: RoutingPlan) -> Tensor:  # type: ignore[override]  # the whole plan, not the ends of groups alone
        """Return [T, D], what each token's experts make of it.

        Args:
            rows: [T, D], tokens in their own order.
            weight: [T, A].
            plan: of their choices.
        """
        matrices = (self._matrices(key, rows.dtype) for key in self.matrices)
        return self.fused(rows, *matrices, plan, weight)
