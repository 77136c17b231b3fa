"""Sizes and routing of a mixture of experts. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..config import PositiveFloat, Size, Sizes

NotNegative = Annotated[float, Field(ge=0)]


def is_load(name: str) -> bool:
    """Return whether a name is that of a router's `load`, which is saved and is no weight.

    No Hugging Face model has one; where there is none, it starts anew.
    """
    return name.endswith(".router.load")


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
    bias_rate: NotNegative = 1e-3
    """what an expert's bias changes by after each step"""
    aux_weight: NotNegative = 0.0
    """weight of the load balancing loss (arXiv:2101.03961, equation 4); it is added for each layer
    to the mean loss of a token"""
    aux_scope: Literal["sequence", "global"] = "sequence"
    """where that loss balances the load: in each sequence, or over all of a step, for which it goes
    by the load of the step before"""
    z_weight: NotNegative = 0.0
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
        """Return name and shape of the layer's parameters, in the module's order."""
        experts, ffn_dim, shared = self.num_experts, self.expert_ffn_dim, self.shared_width
        found: dict[str, tuple[int, ...]] = {
            "norm.weight": (dim,),
            "router.weight": (experts, dim),
            "experts.gate_up": (experts, 2, ffn_dim, dim),
            "experts.down": (experts, dim, ffn_dim),
        }
        if shared:
            found |= {
                "shared.gate.weight": (shared, dim),
                "shared.up.weight": (shared, dim),
                "shared.down.weight": (dim, shared),
            }
        return found

    def products(self, dim: int) -> int:
        """Return how many of the layer's weights multiply each token."""
        chosen = 3 * self.experts_per_token * self.expert_ffn_dim
        return dim * (self.num_experts + chosen + 3 * self.shared_width)

    def kept(self, dim: int) -> int:
        """Return how many numbers a token the layer keeps for its backward pass.

        Of each expert its input and output, gate, up and their product.
        """
        a_row = 2 * dim + 3 * self.expert_ffn_dim
        return self.experts_per_token * a_row + 3 * self.shared_width
