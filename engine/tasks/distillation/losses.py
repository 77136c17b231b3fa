"""Tables of the losses of distillation. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..tables import LossConfig

if TYPE_CHECKING:
    from ....kernels.choose import Kernels


class DistillationLoss(LossConfig):
    """Base of the divergences of a student from a teacher."""

    tasks: ClassVar[tuple[str, ...]] = ()

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """both models' logits are divided by it, and the divergence is multiplied by its square"""
    hard_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """share of the cross entropy with the data's own tokens; the divergence has the rest"""

    def build(self, kernels: Kernels) -> Any:
        """Return the criterion of a student's outputs."""
        from functools import partial

        from ....kernels.divergence import reference
        from .criterion import SoftCriterion

        divergences = {
            "forward_kl": reference.forward_kl,
            "reverse_kl": reference.reverse_kl,
            "jensen_shannon": reference.jensen_shannon,
        }
        divergence = partial(divergences[self.name], **self.options)
        return SoftCriterion(divergence, self.temperature, self.hard_weight, kernels)

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of the divergence."""
        return {}


class ForwardKL(DistillationLoss):
    """KL(teacher || student): the student covers what the teacher does (arXiv:1503.02531)."""

    name: Literal["forward_kl"] = "forward_kl"


class ReverseKL(DistillationLoss):
    """KL(student || teacher): the student avoids what the teacher does not (arXiv:2306.08543)."""

    name: Literal["reverse_kl"] = "reverse_kl"


class JensenShannon(DistillationLoss):
    """Generalised Jensen-Shannon divergence, between both KLs (arXiv:2306.13649, section 2)."""

    name: Literal["jensen_shannon"] = "jensen_shannon"
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """the teacher's share of the mixture that both are compared with"""

    @property
    def options(self) -> dict[str, Any]:
        """The share of the mixture."""
        return {"beta": self.beta}
