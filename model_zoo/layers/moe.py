"""A mixture of experts in place of a block's feed-forward half."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ...kernels.moe.aux_loss import add_aux_loss
from ...kernels.routing.reference import RoutingPlan
from ...kernels.summation import sum_dtype, widen
from .configs import MoESettings
from .dense import GatedMLP, RMSNorm
from .experts import Experts, FusedExperts
from .router import Router, TokenWeights, padding_of

NUM_OTHER_COUNTS = 3
"""numbers in `MoE.load_counter` after the rows of each expert: dropped rows, entropy, losses"""


class RoutedTokens(NamedTuple):
    """The tokens of a layer, sorted by expert; `FusedExperts` take them unsorted."""

    x: Tensor
    """[B, S, D]: tokens after the norm"""
    rows: Tensor
    """[M, D]: a row for each expert of each token; unsorted: [T, D]"""
    weight: Tensor
    """[M]: the router's weight of each row; unsorted: [T, A]"""
    plan: RoutingPlan
    is_padding: Tensor | None
    """[T, 1] bool: tokens that no expert takes; None: there is none"""


class MoE(nn.Module):
    """Norm, router, experts (Shazeer et al. 2017, arXiv:1701.06538), and the shared expert if any.

    The engine sets three tensors. `loss_factor` scales the gradient of the router's losses, which
    are sums over sequences. `token_factor` also scales losses that are means over all tokens of a
    step: it is the step's positions over its tokens without padding, and of flat rows the step's
    samples over its tokens. Each backward pass adds to
    `load_counter`. Without an engine the factors are 1, and the counter can be read and cleared.

    Args:
        dim: D.
        settings: of the layer.
        norm_eps: see `RMSNorm`.
        kernels: the implementations.
    """

    loss_factor: Tensor
    """fp32 scalar"""
    token_factor: Tensor
    """fp64 scalar; without padding it is not read"""
    load_counter: Tensor
    """fp64 [E + 3]: rows of each expert, rows dropped, the entropy of each row's token, and the
    router's losses"""

    def __init__(self, dim: int, settings: MoESettings, norm_eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.settings = settings
        self.norm = RMSNorm(dim, norm_eps, kernels)
        self.router = self.make_router(dim)
        self.experts = self.make_experts(dim, kernels)
        self.shared: GatedMLP | None = None
        if settings.shared_width:
            self.shared = GatedMLP(dim, settings.shared_width, None, kernels)
        self.is_fused = isinstance(self.experts, FusedExperts)
        self.permute = kernels.permute
        self.register_buffer("loss_factor", torch.ones(()), persistent=False)
        one = torch.ones((), dtype=torch.float64)
        self.register_buffer("token_factor", one, persistent=False)
        # In fp64, because fp32 stops counting rows at 2**24.
        load_counter = torch.zeros(settings.num_experts + NUM_OTHER_COUNTS, dtype=torch.float64)
        self.register_buffer("load_counter", load_counter, persistent=False)

    def make_router(self, dim: int) -> Router:
        """Return the router; a family with another router overrides it."""
        return Router(dim, self.settings)

    def make_experts(self, dim: int, kernels: Kernels) -> Experts:
        """Return the experts; a family with other experts overrides it."""
        if kernels.moe is not None:
            return FusedExperts(dim, self.settings, kernels, kernels.moe)
        return Experts(dim, self.settings, kernels)

    def init_buffers(self, device: torch.device) -> None:
        """Give the buffers of this layer and of its router their initial values."""
        self.router.init_buffers(device)
        self.loss_factor = torch.ones((), device=device)
        wide = sum_dtype(device)
        self.token_factor = torch.ones((), dtype=wide, device=device)
        self.load_counter = torch.zeros(len(self.load_counter), dtype=wide, device=device)

    def forward(self, x: Tensor, token_weights: TokenWeights = None) -> Tensor:
        """Return what [B, S, D] adds to the residual stream.

        Args:
            x: what blocks pass on.
            token_weights: see `TokenWeights`; no expert takes padding.
        """
        routed = self.route(x, token_weights)
        sent: tuple[Any, ...] = routed.rows, routed.weight, routed.plan
        if not self.is_fused:
            sent = self.experts.exchange.dispatch(routed.rows, routed.weight, routed.plan.offs)
        shared_BSD = None if self.shared is None else self.shared(routed.x)  # while rows travel
        return self.merge(self.experts(*sent), shared_BSD, routed)

    def route(self, x: Tensor, token_weights: TokenWeights) -> RoutedTokens:
        """Normalise tokens [B, S, D], choose their experts, and sort them; see `forward`."""
        x_BSD = self.norm(x)
        # Dynamo (torch 2.13) traces a graph twice that takes an fp64 scalar and does not use it.
        token_factor = None if token_weights is None else self.token_factor
        routing = self.router(x_BSD, token_weights, token_factor)
        is_padding_T1 = padding_of(token_weights)
        plan, dropped = self._plan(routing.chosen, is_padding_T1)
        # Once for each row of a token, because the counter is divided by the number of rows.
        entropy = widen(routing.entropy).view(1) * self.settings.experts_per_token
        loss = widen(routing.loss.detach()).view(1)
        load = torch.cat([widen(plan.counts), dropped, entropy, loss])
        weight_TA = add_aux_loss(
            routing.weight, routing.loss, self.loss_factor, self.load_counter, load
        )
        # Products leave the rows behind those of experts undefined, and their gradients: padding is
        # cleared before it is copied to rows, and after they are summed.
        x_TD = _clear_padding(x_BSD.flatten(0, 1), is_padding_T1)
        rows, weight = x_TD, _clear_padding(weight_TA, is_padding_T1)
        if not self.is_fused:
            rows, weight = self._sort_rows(rows, weight, plan)
        return RoutedTokens(x_BSD, rows, weight, plan, is_padding_T1)

    def merge(self, rows: Tensor, shared: Tensor | None, routed: RoutedTokens) -> Tensor:
        """Return [B, S, D], the sum of what each token's experts and the shared one made of it.

        Args:
            rows: outputs of the experts, [M, D]; of `FusedExperts` [T, D], the sums of each token.
            shared: output of the shared expert, [B, S, D]; None: there is none.
            routed: what `route` returned.
        """
        plan, out_TD = routed.plan, rows
        if not self.is_fused:
            out_TD = self.permute.combine(self._clear_dropped(rows, plan), plan)
        out_BSD = _clear_padding(out_TD, routed.is_padding).view_as(routed.x)
        return out_BSD if shared is None else out_BSD + shared

    def _plan(self, chosen: Tensor, is_padding: Tensor | None) -> tuple[RoutingPlan, Tensor]:
        """Return where rows go, and how many are dropped, fp64 [1].

        The counts are those of the choices. Rows that are dropped and those of padding lie behind
        those of all experts.
        """
        experts, factor = self.settings.num_experts, self.settings.capacity_factor
        plan = self.permute.plan(chosen, experts + (is_padding is not None))
        if is_padding is not None:
            plan = plan._replace(counts=plan.counts[:experts], offs=plan.offs[:experts])
        if factor is None:
            return plan, torch.zeros(1, dtype=sum_dtype(chosen.device), device=chosen.device)
        rows = widen(plan.offs[-1:])
        is_over = plan.slot - plan.starts[chosen] >= factor * rows / experts
        # A second plan, because a selection of rows would have a length that only the device knows.
        kept = self.permute.plan(chosen.masked_fill(is_over, experts), experts + 1)
        dropped = rows - widen(kept.offs[experts - 1 : experts])
        return kept._replace(counts=plan.counts, offs=kept.offs[:experts]), dropped

    def _sort_rows(self, x: Tensor, weight: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
        """Return [M, D] rows by expert, and the weight of each, [M]."""
        slot = plan.slot.flatten().long()
        # Every row is written once, so the copy and its gradient repeat bit for bit.
        weight_M = weight.new_zeros(slot.shape).index_copy(0, slot, weight.flatten())
        return self._clear_dropped(self.permute.gather(x, plan), plan), self._clear_dropped(
            weight_M, plan
        )

    def _clear_dropped(self, rows: Tensor, plan: RoutingPlan) -> Tensor:
        """Clear the rows that are dropped, and their gradients, which products leave undefined."""
        if self.settings.capacity_factor is None:
            return rows
        is_dropped_M = torch.arange(len(rows), device=rows.device) >= plan.offs[-1]
        return rows.masked_fill(is_dropped_M.view(-1, *[1] * (rows.ndim - 1)), 0)


def _clear_padding(rows: Tensor, is_padding: Tensor | None) -> Tensor:
    return rows if is_padding is None else rows.masked_fill(is_padding, 0)


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Return a model's mixtures of experts by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, MoE)}
