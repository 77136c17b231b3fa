"""Which experts each token takes, with which weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.ragged.lengths import SampleLengths
from ...kernels.ragged.samples import repeat_for_positions, sum_by_sample
from .configs import MoESettings
from .dense import LocalParameters


class Routing(NamedTuple):
    """The experts that a router chooses for T tokens, and the router's own losses."""

    chosen: Tensor
    """int64 [T, A]: the experts of each token; E, which is no expert, for padding"""
    weight: Tensor
    """[T, A]: the weight of each chosen expert, in fp32, or in fp64 where tokens are fp64"""
    loss: Tensor
    """scalar: the weighted sum of the balance loss and the z-loss, summed over sequences"""
    entropy: Tensor
    """scalar: entropy of the scores as a distribution over experts, in nats, summed over tokens"""


class SampleTokens(NamedTuple):
    """The tokens of a flat row, in place of weights: each sample is a sequence of its own."""

    lengths: SampleLengths
    """the lengths of the samples"""
    is_padding: Tensor | None = None
    """[1, T] bool: tokens that no expert takes and no statistic counts; None: there is none"""


TokenWeights = Tensor | SampleTokens | None
"""[B, S], of each token in a mean over its row: 0 at padding, and 1 on average; or the samples of a
flat row; None: no row has padding"""


class _TokenShares(NamedTuple):
    """The weights of tokens in means; None where all are the same."""

    in_row: Tensor | None = None
    """[T, 1]: in the mean over a token's row"""
    in_step: Tensor | None = None
    """[T, 1]: in the mean over a step"""
    is_padding: Tensor | None = None
    """[T, 1] bool"""
    samples: SampleLengths | None = None
    """the rows of a flat row; the weights in a row then are those of a sum"""


def padding_of(token_weights: TokenWeights) -> Tensor | None:
    """Return which tokens no expert takes, [T, 1]; None where there is none."""
    if isinstance(token_weights, SampleTokens):
        mask = token_weights.is_padding
        return None if mask is None else mask.reshape(-1, 1)
    return None if token_weights is None else token_weights.reshape(-1, 1) == 0


def _share(weights: TokenWeights, factor: Tensor | None, dtype: torch.dtype) -> _TokenShares:
    """Return the weights of tokens in means; see `Router.forward`."""
    if weights is None or factor is None:
        return _TokenShares()
    is_padding_T1 = padding_of(weights)
    if isinstance(weights, Tensor):
        assert is_padding_T1 is not None, "weights tell padding"
        in_step_T1 = factor.to(dtype) * ~is_padding_T1
        return _TokenShares(weights.to(dtype).reshape(-1, 1), in_step_T1, is_padding_T1)
    samples = weights.lengths
    # A step's mean is taken over all T positions: see `MoE.token_factor`.
    in_step_T1 = (factor * samples.total).to(dtype).expand(samples.total, 1)
    counts_B1 = samples.counts.unsqueeze(1)
    if is_padding_T1 is not None:
        in_step_T1 = in_step_T1 * ~is_padding_T1
        counts_B1 = sum_by_sample(~is_padding_T1, samples)
    in_row_T1 = repeat_for_positions(counts_B1.clamp(min=1).to(dtype).reciprocal(), samples)
    return _TokenShares(in_row_T1, in_step_T1, is_padding_T1, samples)


class Router(LocalParameters):
    """Scores experts in fp32 and takes the best.

    Args:
        dim: width of the tokens, D.
        settings: settings of the layer of experts.
    """

    bias: Tensor | None
    """[E]: added to scores where experts are chosen, and only there"""
    load: Tensor | None
    """[E]: each expert's share of the rows of the last step, 1 on average"""
    held: Tensor | None = None
    """[E] bool: the experts that tokens may take; None: all"""

    def __init__(self, dim: int, settings: MoESettings) -> None:
        super().__init__()
        self.settings = settings
        self.sum_of_sequence: Callable[[Tensor], Tensor] = lambda counts: counts
        """sums over the ranks that hold parts of the same sequences"""
        self.weight = nn.Parameter(torch.empty(settings.num_experts, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)
        has_load = settings.aux_weight > 0 and settings.aux_scope == "global"
        self.register_buffer("bias", self._fill(0.0) if settings.balance_bias else None)
        self.register_buffer("load", self._fill(1.0) if has_load else None)

    def _fill(self, value: float, device: torch.device | None = None) -> Tensor:
        return torch.full((self.settings.num_experts,), value, device=device)

    def init_buffers(self, device: torch.device) -> None:
        """Give the state of balancing its initial values."""
        if self.bias is not None:
            self.bias = self._fill(0.0, device)
        if self.load is not None:
            self.load = self._fill(1.0, device)

    def forward(
        self, x: Tensor, token_weights: TokenWeights = None, token_factor: Tensor | None = None
    ) -> Routing:
        """Choose experts for [B, S, D].

        Args:
            x: tokens.
            token_weights: see `MoE.forward`.
            token_factor: see `MoE`; given with weights.
        """
        logits_TE = self.logits(x.flatten(0, 1))
        scores_TE, shares_TE = self._scores(logits_TE)
        chosen_TA = self._choose(scores_TE.detach())
        # From the scores without the balance bias, which only decides which experts are chosen.
        weight_TA = scores_TE.gather(1, chosen_TA)
        if self.settings.normalize:
            # Sigmoids may all be close to zero; the number is that of transformers' DeepSeek-V3.
            weight_TA = weight_TA / (weight_TA.sum(1, keepdim=True) + 1e-20)
        if self.settings.scale != 1:
            weight_TA = weight_TA * self.settings.scale
        entropy_TE = torch.special.entr(shares_TE.detach())
        shares = _share(token_weights, token_factor, logits_TE.dtype)
        if shares.is_padding is not None:
            entropy_TE = entropy_TE * ~shares.is_padding
            # After the gather, because E is no column of the scores.
            chosen_TA = chosen_TA.masked_fill(shares.is_padding, self.settings.num_experts)
            weight_TA = weight_TA.masked_fill(shares.is_padding, 0)
        loss, rows = logits_TE.new_zeros(()), x.shape[0]
        if self.settings.z_weight:
            loss = loss + self._z_loss(logits_TE, rows, shares.in_step)
        if self.settings.aux_weight:
            loss = loss + self._balance_loss(shares_TE, chosen_TA, rows, shares)
        return Routing(chosen_TA, weight_TA, loss, entropy_TE.sum())

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [T, E] of [T, D], in fp32 or fp64."""
        # In bf16 close logits round to the same number, and the choice would go by their order.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.local("weight").to(wide))

    def _scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return [T, E] scores, and each one's share of its token's."""
        if self.settings.score == "softmax":
            scores_TE = logits.softmax(1)
            return scores_TE, scores_TE
        scores_TE = logits.sigmoid()
        return scores_TE, scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts [T, A] that [T, E] scores take; nothing here has a gradient."""
        settings = self.settings
        count = settings.experts_per_token
        if settings.force_balanced:
            turn_TA = torch.arange(len(scores) * count, device=scores.device).view(-1, count)
            return turn_TA % settings.num_experts
        if self.bias is not None:
            scores = scores + self.bias
        if self.held is not None:
            scores = scores.masked_fill(~self.held, -torch.inf)
        if settings.is_grouped:
            scores = self._within_groups(scores)
        return scores.topk(count, 1).indices

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Return the scores, minus infinity outside of a token's best groups.

        Node-limited routing (DeepSeek-V2, arXiv:2405.04434, section 2.2.2, and V3,
        arXiv:2412.19437, section 2.1.2, which go by the best and by the two best of a group).
        """
        settings = self.settings
        grouped = scores.view(len(scores), settings.groups, -1)
        best = min(2 if settings.group_score == "top2" else 1, grouped.shape[2])
        of_group = grouped.topk(best, 2).values.sum(2)
        taken = of_group.topk(settings.groups_per_token, 1).indices
        is_out = torch.ones_like(of_group, dtype=torch.bool).scatter(1, taken, False)
        # Not zero: a score with a bias may be negative, and zero would win over it.
        return grouped.masked_fill(is_out.unsqueeze(2), -torch.inf).flatten(1)

    def _z_loss(self, logits: Tensor, sequences: int, in_step: Tensor | None) -> Tensor:
        """Return the logits' mean square over tokens, times the sequences.

        Args:
            logits: [T, E].
            sequences: B.
            in_step: [T, 1], the weight of each token in the mean over a step; None: all the same.
        """
        squares_T = logits.logsumexp(1).square()
        if in_step is not None:
            squares_T = squares_T * in_step.squeeze(1)
        return self.settings.z_weight * (squares_T.sum() * (sequences / len(logits)))

    def _balance_loss(
        self,
        shares: Tensor,
        chosen: Tensor,
        sequences: int,
        tokens: _TokenShares,
    ) -> Tensor:
        """Return the products of each expert's load and mean share, summed over sequences.

        Args:
            shares: [T, E].
            chosen: [T, A].
            sequences: B.
            tokens: the weights of tokens.
        """
        load, weights, experts = self.load, tokens.in_step, shares.shape[1]
        samples = tokens.samples if load is None else None
        if load is None:
            weights = tokens.in_row
            counts_BE = self._count_choices(chosen, sequences, samples, shares.dtype)
            counts_BE = self.sum_of_sequence(counts_BE)
            load = counts_BE * (experts / counts_BE.sum(1, keepdim=True).clamp(min=1))
        if weights is not None:
            shares = shares * weights
        if samples is not None:
            mean_BE = sum_by_sample(shares, samples)
        else:
            mean_BE = shares.view(sequences, -1, experts).mean(1)
        return self.settings.aux_weight * (load * mean_BE).sum()

    def _count_choices(
        self, chosen: Tensor, sequences: int, samples: SampleLengths | None, dtype: torch.dtype
    ) -> Tensor:
        """Return how often each sequence, or sample of a flat row, takes each expert, [B, E]."""
        experts = self.settings.num_experts
        # The last column is for no expert. Sums of ones are exact in any order.
        if samples is None:
            place_RC = chosen.view(sequences, -1)
            counts_RN = torch.zeros(sequences, experts + 1, dtype=dtype, device=chosen.device)
        else:
            place_RC = (samples.numbers.unsqueeze(1) * (experts + 1) + chosen).view(1, -1)
            counts_RN = place_RC.new_zeros(1, len(samples) * (experts + 1), dtype=dtype)
        counts_RN.scatter_add_(1, place_RC, torch.ones_like(place_RC, dtype=dtype))
        return counts_RN.view(-1, experts + 1)[:, :experts].contiguous()
