"""The feed-forward half of a block."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.choose import Kernels
from .linear import Linear
from .norm import RMSNorm


class GatedMLP(nn.Module):
    """Norm and SwiGLU feed-forward layer; without the norm if `norm_eps` is None."""

    def __init__(self, dim: int, ffn_dim: int, norm_eps: float | None, kernels: Kernels) -> None:
        super().__init__()
        self.norm = None if norm_eps is None else RMSNorm(dim, norm_eps, kernels)
        self.gate = Linear(dim, ffn_dim)
        self.up = Linear(dim, ffn_dim)
        self.down = Linear(ffn_dim, dim)
        self.activation = kernels.swiglu

    def forward(self, x: Tensor) -> Tensor:
        """Return what [B, S, D] adds to the residual stream."""
        x_BSD = x if self.norm is None else self.norm(x)
        out_BSD: Tensor = self.down(self.activation(self.gate(x_BSD), self.up(x_BSD)))
        return out_BSD
