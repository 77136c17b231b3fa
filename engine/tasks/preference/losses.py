"""Tables of the losses of preferences. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..tables import LossConfig

if TYPE_CHECKING:
    from ....kernels.choose import Kernels

Positive = Annotated[float, Field(gt=0)]


class PreferenceLoss(LossConfig):
    """Base of the losses of pairs of answers."""

    tasks: ClassVar[tuple[str, ...]] = ()
    uses_reference: ClassVar[bool] = True
    """whether answers are compared with those of a reference model"""
    uses_mismatches: ClassVar[bool] = False
    """whether prompts with answers to other prompts are needed"""

    def build(self, kernels: Kernels) -> Any:
        """Return the criterion of pairs."""
        from .pairs import PairCriterion

        keys = self.model_dump(exclude={"name"})
        return PairCriterion(self.name, keys, self.uses_mismatches, kernels)


class DPO(PreferenceLoss):
    """Direct preference optimization (arXiv:2305.18290, equation 7)."""

    name: Literal["dpo"] = "dpo"
    beta: Positive = 0.1
    """how much a deviation from the reference costs"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """the probability that a pair is the wrong way round (conservative DPO)"""


class IPO(PreferenceLoss):
    """Identity preference optimization (arXiv:2310.12036, equation 17)."""

    name: Literal["ipo"] = "ipo"
    beta: Positive = 0.1
    """pairs are pulled to a difference of log-ratios of 1 / (2 beta); the paper's tau"""
    length_normalized: bool = False
    """divide the log-ratio of an answer by its tokens, as TRL does; the paper adds tokens up"""


class ORPO(PreferenceLoss):
    """Odds ratio beside finetuning on the chosen answer, no reference (arXiv:2403.07691)."""

    uses_reference: ClassVar[bool] = False

    name: Literal["orpo"] = "orpo"
    beta: Positive = 0.1
    """weight of the odds ratio; the paper's lambda"""


class SimPO(PreferenceLoss):
    """Mean log-probability of a token as reward, no reference (arXiv:2405.14734, equation 6)."""

    uses_reference: ClassVar[bool] = False

    name: Literal["simpo"] = "simpo"
    beta: Positive = 2.0
    """multiplies the mean log-probability of a token"""
    gamma: Annotated[float, Field(ge=0)] = 1.0
    """margin by which the chosen answer's reward should be larger"""


class KTO(PreferenceLoss):
    """Kahneman-Tversky optimization: each answer alone is good or bad (arXiv:2402.01306)."""

    uses_mismatches: ClassVar[bool] = True

    name: Literal["kto"] = "kto"
    beta: Positive = 0.1
    """how soon a gain or a loss counts fully"""
    desirable_weight: Positive = 1.0
    """weight of chosen answers"""
    undesirable_weight: Positive = 1.0
    """weight of rejected answers"""


class BradleyTerry(PreferenceLoss):
    """Negative log-probability that the chosen answer wins (arXiv:2203.02155, equation 1)."""

    uses_reference: ClassVar[bool] = False

    name: Literal["bradley_terry"] = "bradley_terry"
