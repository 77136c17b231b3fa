"""Dense layers: projections with or without an adapter, embedding, norm, and feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.choose import Kernels
from ..base import Constant, Normal
from ..matrices import DOWN, is_adapter
from .configs import NormPlacement
from .dropout import drop


class LocalParameters(nn.Module):
    """A layer that computes with `self.local(name)` in place of `self.name`.

    On one device both are the parameter. An engine that distributes a parameter over ranks adds a
    view, and the layer then computes with this rank's part of it.

    Attributes:
        local_views: for a parameter's name, the function from the stored parameter to the tensor
            that the layer computes with.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_views: dict[str, Callable[[Tensor], Tensor]] = {}

    def local(self, name: str) -> Tensor:
        """Return the tensor that the layer computes with for its parameter `name`."""
        parameter: Tensor = getattr(self, name)
        return self.local_views[name](parameter) if name in self.local_views else parameter


class Adapted(LocalParameters):
    """A layer that may have low-rank adapters beside matrices.

    Attributes:
        matrices: names of the parameters that may have one.
        scale: what the adapters' output is multiplied by; 0: they are switched off.
    """

    matrices: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = 0.0

    def with_adapter(
        self, key: str, rank: int, scale: float, *, dropout: float = 0.0, dora: bool = False
    ) -> Adapted:
        """Return the layer with an adapter beside the parameter `key`, which is frozen by others.

        Args:
            key: one of `matrices`.
            rank: width of the adapter.
            scale: what the adapter's output is multiplied by.
            dropout: the share of the adapter's input that is dropped in training.
            dora: whether the adapter also learns the norm of each row; see `DoRALinear`.

        Raises:
            ValueError: the layer's adapters have no dropout, or no DoRA.
        """
        raise NotImplementedError

    def initial_values(self) -> dict[str, Normal | Constant]:
        """Return how A and B start: B is zero, so that the model starts as it was.

        A has the standard deviation that `nn.Linear` starts with. Magnitudes of DoRA are zero until
        the weights that they are the norms of are known.
        """
        # `nn.Linear` draws uniformly within 1 / sqrt(in), which has this standard deviation.
        return {
            name: Normal(1 / math.sqrt(3 * value.shape[-1]))
            if name.endswith(DOWN)
            else Constant(0.0)
            for name, value in self.named_parameters(recurse=False)
            if is_adapter(name)
        }


class Linear(Adapted, nn.Linear):
    """A projection, computed in the dtype of its input.

    Attributes:
        product: how x and weight are multiplied; as `torch.nn.functional.linear`.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        bias = None if self.bias is None else self.local("bias").to(x.dtype)
        return self.product(x, self.local("weight").to(x.dtype), bias)

    def with_adapter(
        self, key: str, rank: int, scale: float, *, dropout: float = 0.0, dora: bool = False
    ) -> AdaptedLinear:
        """Return a projection with the same weight and an adapter."""
        return (DoRALinear if dora else AdaptedLinear)(self, rank, scale, dropout)


class AdaptedLinear(Linear):
    """A projection with a low-rank adapter, of which only A and B are trained.

    It computes x W^T + scale * (x A^T) B^T (LoRA, arXiv:2106.09685, equation 3); in training
    dropout is applied to the x that A multiplies.

    The weight keeps its name; A and B are `lora_a` [rank, in] and `lora_b` [out, rank] beside it.

    Args:
        base: the projection, whose weight and bias it takes.
        rank: width of the adapter.
        scale: what the adapter's output is multiplied by.
        dropout: the share of the adapter's input that is dropped in training.

    Attributes:
        dropout_seed: tells the random numbers of layers apart.
        dropout_keys: [B, S] int64, see `drop`; a block sets them before the layer is called. None:
            torch's generator draws.
        own_positions: maps the keys of whole rows to the positions that the layer is called with,
            where ranks share a sequence.
        first_column: the number of the first column of x, where ranks share the columns.
        sum_columns: sums a tensor over the ranks that share the columns.
    """

    def __init__(self, base: Linear, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(base.in_features, base.out_features)
        # The same parameter objects, so that their names and whatever refers to them stay.
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale
        self.dropout, self.dropout_seed = dropout, 0
        self.dropout_keys: Tensor | None = None
        self.own_positions: Callable[[Tensor], Tensor] = _all_of
        self.first_column = 0
        self.sum_columns: Callable[[Tensor], Tensor] = _all_of
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if not self.scale:  # switched off
            return super().forward(x)
        return super().forward(x) + self.adapt(self.drop_input(x))

    def adapt(self, x: Tensor) -> Tensor:
        """Return the adapter's output, [..., out_features]."""
        # Two narrow products: B A has as many entries as the weight, and is not computed here.
        narrow = F.linear(x, self.local("lora_a").to(x.dtype))
        return F.linear(narrow, self.local("lora_b").to(x.dtype)) * self.scale

    def drop_input(self, x: Tensor) -> Tensor:
        """Apply dropout to the input of the adapter, in training alone."""
        if not (self.training and self.dropout):
            return x
        keys = self.dropout_keys
        if keys is not None:
            # A layer of experts computes this rank's positions; before it, a norm gathers all.
            if keys.shape[1] != x.shape[1]:
                keys = self.own_positions(keys)
            keys = keys + self.dropout_seed
        return drop(x, self.dropout, keys, self.first_column)


class DoRALinear(AdaptedLinear):
    """A projection whose adapter changes directions of rows, and whose rows' norms are trained.

    It computes x V^T with V = m * (W + scale * B A) / |W + scale * B A|, with the norm of each row
    (DoRA, arXiv:2402.09353, equation 5), which is a constant in the backward pass (section 4.3).

    The magnitudes m are `lora_magnitude` [out] beside the weight.

    Args:
        base: see `AdaptedLinear`, as for the others.
    """

    def __init__(self, base: Linear, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(base, rank, scale, dropout)
        self.lora_magnitude = nn.Parameter(torch.empty(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if not self.scale:  # switched off
            return super().forward(x)
        weight, dropped = self.local("weight").to(x.dtype), self.drop_input(x)
        plain = self.product(dropped, weight, None)
        ratio = (self.local("lora_magnitude") / self.norms()).to(x.dtype)
        out = ratio * (plain + self.adapt(dropped))
        if dropped is not x:
            # Dropout is for what the adapter changes, as in PEFT: x W^T has all of x.
            out = out + self.product(x, weight, None) - plain
        return out if self.bias is None else out + self.local("bias").to(x.dtype)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the norm of each row of W + scale * B A, [out], in fp32 or wider."""
        weight, down, up = map(self.local, ("weight", "lora_a", "lora_b"))
        wide = torch.promote_types(weight.dtype, torch.float32)
        down, up = down.to(wide), up.to(wide)
        # |w + s b A|^2 = |w|^2 + 2 s (w A^T) b + s^2 (b A A^T) b: without B A, which is as large
        # as the weight.
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
        crossed = F.linear(weight, down.to(weight.dtype)).to(wide)
        added = up @ (down @ down.mT) * self.scale
        squares = squares + ((2 * crossed + added) * up).sum(1) * self.scale
        return self.sum_columns(squares).clamp(min=torch.finfo(wide).tiny).sqrt()


def _all_of(x: Tensor) -> Tensor:
    return x


class Embedding(LocalParameters, nn.Embedding):
    """A vector for each token.

    Attributes:
        lookup: takes tokens and the weight; as `torch.nn.functional.embedding`.
    """

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.lookup: Callable[[Tensor, Tensor], Tensor] = F.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, S] to [B, S, D]."""
        return self.lookup(tokens, self.local("weight"))


class RMSNorm(LocalParameters):
    """Root-mean-square norm over the last dim, with a learned scale."""

    def __init__(self, dim: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.kernel = kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., D]."""
        return self.kernel(x, self.local("weight"), self.eps)


def make_norms(
    dim: int, eps: float, kernels: Kernels, norms: NormPlacement
) -> tuple[RMSNorm | None, RMSNorm | None]:
    """Return the norm before a half of a block and the norm after it, where it has them."""
    before = None if norms == "after" else RMSNorm(dim, eps, kernels)
    return before, None if norms == "before" else RMSNorm(dim, eps, kernels)


class GatedMLP(nn.Module):
    """Norms and SwiGLU feed-forward layer; without norms if `norm_eps` is None."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        norm_eps: float | None,
        kernels: Kernels,
        norms: NormPlacement = "before",
    ) -> None:
        super().__init__()
        self.norm = self.post_norm = None
        if norm_eps is not None:
            self.norm, self.post_norm = make_norms(dim, norm_eps, kernels, norms)
        self.gate = Linear(dim, ffn_dim)
        self.up = Linear(dim, ffn_dim)
        self.down = Linear(ffn_dim, dim)
        self.activation = kernels.swiglu

    def forward(self, x: Tensor, token_weights: Tensor | None = None) -> Tensor:
        """Return what [B, S, D] adds to the residual stream; token weights are for `MoE` alone."""
        x_BSD = x if self.norm is None else self.norm(x)
        out_BSD: Tensor = self.down(self.activation(self.gate(x_BSD), self.up(x_BSD)))
        return out_BSD if self.post_norm is None else self.post_norm(out_BSD)
