"""Tables of optimizers whose state is smaller than the weights. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..tables import NonNegativeFloat, OptimizerConfig, optimizers

if TYPE_CHECKING:
    import torch


@optimizers.register
class Adafactor(OptimizerConfig):
    """Means of squares over rows and columns alone (Shazeer & Stern 2018, arXiv:1804.04235).

    Rules, keys and defaults are those of torch.optim.Adafactor.
    """

    name: Literal["adafactor"] = "adafactor"
    lr: NonNegativeFloat = 1e-2
    """peak learning rate, relative to the root mean square of each parameter; it is never above
    1 / sqrt(step)"""
    weight_decay: NonNegativeFloat = 0.0
    """decoupled weight decay"""
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    """exponent of the step in the weight of the newest squares in their mean"""
    eps: Annotated[tuple[NonNegativeFloat, NonNegativeFloat], Field(strict=False)] = (
        1.1920929e-07,
        1e-3,
    )
    """least value of the denominator, and least size of a parameter that the rate is relative to"""
    d: Annotated[float, Field(ge=1)] = 1.0
    """largest root mean square of an update before the rate multiplies it"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over torch parameter groups."""
        from .adafactor import AdafactorOptimizer

        keys = {"lr", "weight_decay", "beta2_decay", "eps", "d"}
        return AdafactorOptimizer(groups, **self.model_dump(include=keys))
