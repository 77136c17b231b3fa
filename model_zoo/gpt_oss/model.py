"""gpt-oss (OpenAI 2025, arXiv:2508.10925, section 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ...kernels.swiglu.reference import clamped_swiglu
from ..decoder import Decoder
from ..layers.attention import GroupedQueryAttention
from ..layers.configs import MoESettings
from ..layers.experts import Experts
from ..layers.moe import MoE
from ..layers.router import Router
from .config import GptOssConfig


class BiasedRouter(Router):
    """A router whose logits have a bias. Unlike the one that balances, it is learned."""

    def __init__(self, dim: int, settings: MoESettings) -> None:
        super().__init__(dim, settings)
        self.logit_bias = nn.Parameter(torch.zeros(settings.num_experts))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [T, E] of [T, D]."""
        logits_TE = super().logits(x)
        return logits_TE + self.local("logit_bias").to(logits_TE.dtype)


class ClampedExperts(Experts):
    """Experts with biases, and limits inside.

    Args:
        config: sizes.
        kernels: the implementations.
    """

    def __init__(self, config: GptOssConfig, kernels: Kernels) -> None:
        super().__init__(config.dim, config.moe, kernels)
        self.gate_up_bias = nn.Parameter(torch.zeros(self.gate_up.shape[:3]))
        self.down_bias = nn.Parameter(torch.zeros(self.down.shape[:2]))
        self.swiglu_limit, self.swiglu_alpha = config.swiglu_limit, config.swiglu_alpha

    def compute(self, rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return each row as its expert makes it, times its weight; see `Experts`."""
        dtype, place_M = rows.dtype, torch.arange(len(rows), device=rows.device)
        # Rows behind the last expert's belong to no expert, and products leave their gradients
        # undefined: one more row of biases takes them.
        expert_M = torch.searchsorted(offs, place_M, right=True)
        gate_up_MF = self.multiply("gate_up", rows, offs)
        gate_up_MF = gate_up_MF + self._bias(self.local("gate_up_bias"), expert_M).to(dtype)
        gate_MF, up_MF = gate_up_MF.chunk(2, dim=-1)
        hidden_MF = clamped_swiglu(gate_MF, up_MF, self.swiglu_limit, self.swiglu_alpha, weight)
        out_MD = self.multiply("down", hidden_MF, offs)
        # The weight is inside the product already (see `Experts.compute`), but not in the bias.
        bias_MD = self._bias(self.local("down_bias"), expert_M) * weight.unsqueeze(1)
        return out_MD + bias_MD.to(dtype)

    @staticmethod
    def _bias(bias: Tensor, expert: Tensor) -> Tensor:
        """Return [M, ...], each row's bias; none for the number behind the last expert."""
        return F.embedding(expert, F.pad(bias.flatten(1), (0, 0, 0, 1)))


class ClampedMoE(MoE):
    """A mixture of `ClampedExperts`.

    Args:
        config: sizes.
        kernels: the implementations.
    """

    def __init__(self, config: GptOssConfig, kernels: Kernels) -> None:
        # Before the base class, whose constructor calls `make_experts`.
        self.config = config
        super().__init__(config.dim, config.moe, config.norm_eps, kernels)

    def make_router(self, dim: int) -> Router:
        """Return the router."""
        return BiasedRouter(dim, self.settings)

    def make_experts(self, dim: int, kernels: Kernels) -> Experts:
        """Return the experts."""
        return ClampedExperts(self.config, kernels)


class GptOss(Decoder):
    """gpt-oss."""

    config: GptOssConfig

    def make_attention(self, number: int, kernels: Kernels) -> nn.Module:
        """Return attention that sees a window of the row, or all of it."""
        window = self.config.window_of(number)
        return GroupedQueryAttention(self.config, kernels, sinks=True, window=window)

    def make_mlp(self, number: int, kernels: Kernels) -> nn.Module:
        """Return experts with biases."""
        return ClampedMoE(self.config, kernels)
