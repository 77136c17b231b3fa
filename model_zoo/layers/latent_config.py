"""Sizes of latent attention. Torch-free."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from ..config import Size, Sizes


class LatentSizes(Sizes):
    """Multi-head latent attention: keys and values are made from one narrow vector a position."""

    q_lora_rank: Size | None = None
    """width of the latent that queries are made from; none makes them from the residual stream"""
    kv_lora_rank: Size = 32
    """width of the latent that keys and values are made from"""
    nope_head_dim: Size = 16
    """how many numbers of a head's query and key have no position"""
    rope_head_dim: Size = 8
    """how many are turned by the rotary embedding; the key's are the same for all heads"""
    value_head_dim: Size = 16
    """width of a head's value"""

    @property
    def key_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_head_dim + self.rope_head_dim

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        if self.rope_head_dim % 2:
            raise ValueError(f"rope_head_dim ({self.rope_head_dim}) must be even: RoPE turns pairs")
        if self.value_head_dim > self.key_head_dim:
            raise ValueError(
                f"value_head_dim ({self.value_head_dim}) must be at most "
                f"nope_head_dim + rope_head_dim ({self.key_head_dim})"
            )
        return self

    def attention_shapes(self, dim: int, n_heads: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the layer's parameters, in order."""
        queries = n_heads * self.key_head_dim
        if self.q_lora_rank is None:
            q: dict[str, tuple[int, ...]] = {"q": (queries, dim)}
        else:
            rank = self.q_lora_rank
            q = {"q_down": (rank, dim), "q_norm": (rank,), "q_up": (queries, rank)}
        shapes: dict[str, tuple[int, ...]] = {
            "norm": (dim,),
            **q,
            "kv_down": (self.kv_lora_rank + self.rope_head_dim, dim),
            "kv_norm": (self.kv_lora_rank,),
            "kv_up": (n_heads * (self.nope_head_dim + self.value_head_dim), self.kv_lora_rank),
            "o": (dim, n_heads * self.value_head_dim),
        }
        return {f"attention.{name}.weight": shape for name, shape in shapes.items()}
