"""Settings of layers: places of norms, experts, latent attention. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from ..sizes import PositiveFloat, Size, Sizes

NormPlacement = Literal["before", "after", "both"]
"""where a half of a block has norms: of its input, of its output, which is then added to the
residual stream, or of both"""


class MoESettings(Sizes):
    """A layer of experts, of which each token takes a few."""

    num_experts: Size = 8
    """experts that tokens choose from"""
    experts_per_token: Size = 2
    """experts that each token takes"""
    expert_ffn_dim: Size = 64
    """width inside an expert"""
    num_shared: Annotated[int, Field(ge=0, le=2**10)] = 0
    """experts that every token takes besides; they are computed as one wide one"""
    shared_ffn_dim: Size | None = None
    """width inside a shared expert; default: expert_ffn_dim"""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """how the router's logits become scores: "softmax" over all experts, or "sigmoid" of each"""
    normalize: bool = True
    """divide the scores of a token's experts by their sum"""
    scale: PositiveFloat = 1.0
    """the experts' weights are multiplied by this"""
    groups: Size = 1
    """experts are in so many groups of equal size, neighbours together"""
    groups_per_token: Size = 1
    """groups that a token may take experts from"""
    group_score: Literal["max", "top2"] = "top2"
    """what a group is chosen by: its highest score, or the sum of its two highest"""
    capacity_factor: PositiveFloat | None = None
    """an expert takes at most so many times its even share of a rank's micro batch, the first ones,
    and the rest is dropped, so that training depends on how a batch is split; none: nothing is
    dropped"""
    balance_bias: bool = False
    """experts are chosen by their score plus a bias that evens out their load (arXiv:2408.15664)"""
    bias_rate: NonNegativeFloat = 1e-3
    """what an expert's bias changes by after each step"""
    aux_weight: NonNegativeFloat = 0.0
    """weight of the load balancing loss (arXiv:2101.03961, equation 4); it is added for each layer
    to the mean loss of a token"""
    aux_scope: Literal["sequence", "global"] = "sequence"
    """where that loss balances the load: in each sequence, or over all of a step, for which it goes
    by the load of the step before"""
    z_weight: NonNegativeFloat = 0.0
    """weight of the mean square of the logits' log-sum-exp (arXiv:2202.08906, equation 5)"""
    force_balanced: bool = False
    """tokens take experts in turn, whatever their scores: for measurements of speed"""

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.num_experts % self.groups:
            raise ValueError(
                f"num_experts ({self.num_experts}) must be a multiple of groups ({self.groups})"
            )
        if self.groups_per_token > self.groups:
            raise ValueError(
                f"groups_per_token ({self.groups_per_token}) must not exceed groups ({self.groups})"
            )
        reach = self.num_experts // self.groups * self.groups_per_token
        if self.experts_per_token > reach:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) must not exceed the {reach} experts "
                "that a token can choose from"
            )
        if self.experts_per_token == 1 < self.num_experts and self.normalize:
            raise ValueError(
                "experts_per_token = 1 needs normalize = false: divided by itself, the score of a "
                "token's only expert is always 1, and the router learns nothing from the loss"
            )
        return self

    def require(self, **fixed: object) -> None:
        """Raise a ValueError of all settings that are not what a family's are."""
        wrong = [
            f"moe.{key} must be {wanted!r}, not {getattr(self, key)!r}"
            for key, wanted in fixed.items()
            if getattr(self, key) != wanted
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def is_grouped(self) -> bool:
        """Whether some groups are out of a token's reach."""
        return self.groups_per_token < self.groups

    @property
    def shared_width(self) -> int:
        """Width inside all shared experts together; 0 without any."""
        return self.num_shared * (self.shared_ffn_dim or self.expert_ffn_dim)

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return name (inside of a block) and shape of the layer's parameters, in order."""
        experts, ffn_dim, shared = self.num_experts, self.expert_ffn_dim, self.shared_width
        shapes: dict[str, tuple[int, ...]] = {
            "mlp.norm.weight": (dim,),
            "mlp.router.weight": (experts, dim),
            "mlp.experts.gate_up": (experts, 2, ffn_dim, dim),
            "mlp.experts.down": (experts, dim, ffn_dim),
        }
        if shared:
            shapes |= {
                "mlp.shared.gate.weight": (shared, dim),
                "mlp.shared.up.weight": (shared, dim),
                "mlp.shared.down.weight": (dim, shared),
            }
        return shapes

    def active_parameters(self, dim: int) -> int:
        """Return how many of the layer's weights multiply each token."""
        # The router multiplies for all experts; gate, up and down only for those that are chosen.
        chosen = 3 * self.experts_per_token * self.expert_ffn_dim
        return dim * (self.num_experts + chosen + 3 * self.shared_width)

    def saved_activations(self, dim: int) -> int:
        """Return how many numbers a token the layer saves for its backward pass.

        For each chosen expert these are its input and output, gate, up, and the product of the two.
        """
        per_row = 2 * dim + 3 * self.expert_ffn_dim
        return self.experts_per_token * per_row + 3 * self.shared_width


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

    def latent_shapes(self, dim: int, n_heads: int) -> dict[str, tuple[int, ...]]:
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
