"""What preferences are scored by: functions of the log-probabilities of whole answers.

The log-probability of an answer is the sum over its tokens, in nats, given its prompt. Rewards are
what the criterion's paper calls implicit rewards; they are reported and have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """The answers of one side of a batch of samples.

    Attributes:
        log_probs: [B] log-probability of each answer under the model that is trained.
        tokens: [B] number of tokens of each answer.
        reference: [B] log-probability under the reference model; None where there is none.
    """

    log_probs: Tensor
    tokens: Tensor
    reference: Tensor | None = None

    @property
    def log_ratios(self) -> Tensor:
        """The logarithm of the model's probability over the reference's, [B]."""
        assert self.reference is not None, "the criterion says that it needs a reference"
        return self.log_probs - self.reference

    @property
    def mean_log_probs(self) -> Tensor:
        """The mean over the tokens of each answer, [B]."""
        return self.log_probs / self.tokens.clamp(min=1)


class Scores(NamedTuple):
    """The result of a criterion for each pair.

    Attributes:
        losses: [B] what is minimised.
        chosen: [B] reward of each chosen answer, without gradient.
        rejected: [B] reward of each rejected answer, without gradient.
    """

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def dpo(chosen: Answers, rejected: Answers, beta: float, label_smoothing: float) -> Scores:
    """Score pairs by direct preference optimization (arXiv:2305.18290, equation 7).

    Args:
        chosen: the preferred answers.
        rejected: the other answers to the same prompts.
        beta: how much a deviation from the reference costs.
        label_smoothing: the probability that a pair is the wrong way round ("conservative DPO",
            Mitchell 2023, "A note on DPO with noisy preferences", equation 3).
    """
    rewards = beta * chosen.log_ratios, beta * rejected.log_ratios
    margins = rewards[0] - rewards[1]
    losses = -F.logsigmoid(margins) * (1 - label_smoothing)
    if label_smoothing:
        losses = losses - F.logsigmoid(-margins) * label_smoothing
    return _scores(losses, *rewards)


def ipo(chosen: Answers, rejected: Answers, beta: float, length_normalized: bool) -> Scores:
    """Score pairs by identity preference optimization (arXiv:2310.12036, equation 17).

    Args:
        chosen: the preferred answers.
        rejected: the other answers to the same prompts.
        beta: the paper's tau: pairs are pulled to a difference of log-ratios of 1 / (2 beta).
        length_normalized: divide the log-ratio of each answer by the number of its tokens, as TRL
            does; the paper adds up tokens.
    """
    ratios = [each.log_ratios for each in (chosen, rejected)]
    if length_normalized:
        ratios = [
            ratio / each.tokens.clamp(min=1)
            for ratio, each in zip(ratios, (chosen, rejected), strict=True)
        ]
    losses = (ratios[0] - ratios[1] - 1 / (2 * beta)).square()
    return _scores(losses, beta * ratios[0], beta * ratios[1])


def orpo(chosen: Answers, rejected: Answers, beta: float) -> Scores:
    """Score pairs by their odds ratio (arXiv:2403.07691, equations 6 and 7), without a reference.

    The log-probability of an answer is the mean over its tokens (equation 2), and its negative for
    the chosen one is the part that finetunes.

    Args:
        chosen: the preferred answers.
        rejected: the other answers to the same prompts.
        beta: the paper's lambda, the weight of the odds ratio.
    """
    means = chosen.mean_log_probs, rejected.mean_log_probs
    log_odds = [mean - _log_one_minus_exp(mean) for mean in means]
    losses = -means[0] - beta * F.logsigmoid(log_odds[0] - log_odds[1])
    return _scores(losses, beta * means[0], beta * means[1])


def simpo(chosen: Answers, rejected: Answers, beta: float, gamma: float) -> Scores:
    """Score pairs by SimPO (arXiv:2405.14734, equation 6), without a reference.

    Args:
        chosen: the preferred answers.
        rejected: the other answers to the same prompts.
        beta: multiplies the mean log-probability of a token.
        gamma: the margin by which the chosen answer's reward should be larger.
    """
    rewards = beta * chosen.mean_log_probs, beta * rejected.mean_log_probs
    return _scores(-F.logsigmoid(rewards[0] - rewards[1] - gamma), *rewards)


def kto(
    answers: Answers,
    is_desirable: Tensor,
    reference_point: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> tuple[Tensor, Tensor]:
    """Score single answers by Kahneman-Tversky optimization (arXiv:2402.01306, equation 8).

    Args:
        answers: one answer to each prompt.
        is_desirable: [B] bool.
        reference_point: what a reward is compared with, in nats, a scalar; see
            `kto_reference_point`.
        beta: how soon a gain or a loss counts fully.
        desirable_weight: the paper's lambda of desirable answers.
        undesirable_weight: the paper's lambda of undesirable answers.

    Returns:
        [B] what is minimised, and [B] the reward of each answer, without gradient.
    """
    ratios = answers.log_ratios
    gains = torch.where(is_desirable, ratios - reference_point, reference_point - ratios)
    weights = torch.where(is_desirable, desirable_weight, undesirable_weight)
    # The negative argument instead of 1 minus the sigmoid, which cancels near 1.
    return weights * torch.sigmoid(-beta * gains), beta * ratios.detach()


def kto_reference_point(sum_of_log_ratios: Tensor, count: Tensor) -> Tensor:
    """Return KTO's estimate of the divergence from the reference (arXiv:2402.01306, section 4).

    Args:
        sum_of_log_ratios: the sum, over the samples of the global batch, of the log-ratio of
            another sample's answer to the prompt; without gradient.
        count: the number of samples.
    """
    return (sum_of_log_ratios / count).clamp(min=0)


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Scores:
    """Score pairs by the negative log-probability that the chosen answer wins.

    The Bradley-Terry model, as in Ouyang et al. 2022, arXiv:2203.02155, equation 1.

    Args:
        chosen: [B] rewards of the preferred answers.
        rejected: [B] rewards of the other answers to the same prompts.
    """
    return _scores(-F.logsigmoid(chosen - rejected), chosen, rejected)


def _scores(losses: Tensor, chosen: Tensor, rejected: Tensor) -> Scores:
    return Scores(losses, chosen.detach(), rejected.detach())


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of negative numbers, accurate near 0 and far from it.

    Maechler 2012, "Accurately computing log(1 - exp(-|a|))", equation 7.
    """
    # A model that is certain of all tokens has x = 0, and its odds no finite logarithm.
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    is_near = x > -0.6931471805599453
    # Each branch gets arguments whose gradient is finite: where() multiplies the other's by 0.
    near = (-torch.expm1(x.where(is_near, -0.5))).log()
    return torch.where(is_near, near, torch.log1p(-x.where(~is_near, -1).exp()))
