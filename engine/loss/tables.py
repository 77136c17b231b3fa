"""Losses: their recipe tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ..core.config import Component
from ..core.registry import Registry

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from ...model_zoo.language_model import LossFunction


class LossConfig(Component):
    """Base of every loss's table."""

    def build(self, kernels: Kernels) -> LossFunction:
        """Return the function from hidden states, head weight and labels to the summed loss."""
        raise NotImplementedError


losses: Registry[LossConfig] = Registry("loss", default="cross_entropy")


@losses.register
class CrossEntropy(LossConfig):
    """Cross entropy of the next token, computed in chunks: all logits are never held at once."""

    name: Literal["cross_entropy"] = "cross_entropy"
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """weight of the squared log-partition (PaLM, arXiv:2204.02311, section 5)"""

    def build(self, kernels: Kernels) -> LossFunction:
        """Return the chunked linear cross entropy."""
        from functools import partial

        return partial(kernels.linear_cross_entropy, z_loss=self.z_loss)
