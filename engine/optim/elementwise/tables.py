"""Tables of the optimizers that update each element on its own. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...core.config import Betas, CountOrZero
from ..tables import NonNegativeFloat, OptimizerConfig, PositiveFloat, optimizers

if TYPE_CHECKING:
    import torch

Share = Annotated[float, Field(ge=0, le=1)]


class ElementwiseConfig(OptimizerConfig):
    """What these optimizers share."""

    group_keys = frozenset({"lr", "weight_decay", "betas", "eps"})
    implementation: ClassVar[str]
    """the module and the class of the optimizer, which takes this table's own keys"""

    cautious_decay: bool = False
    """decay only elements that the update moves towards 0 (arXiv:2510.12402)"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over torch parameter groups."""
        module, name = self.implementation.split(":")
        make: Callable[..., torch.optim.Optimizer]
        make = getattr(import_module(f".{module}", __package__), name)
        return make(groups, **self.model_dump(exclude={"name", "clip_norm", "groups"}))


@optimizers.register
class ADOPT(ElementwiseConfig):
    """Adam that converges with any beta2: it divides by the gradients before (arXiv:2411.02853)."""

    implementation = "adopt:ADOPTOptimizer"

    name: Literal["adopt"] = "adopt"
    lr: NonNegativeFloat = 1e-3
    """peak learning rate; the schedule multiplies it"""
    betas: Betas = (0.9, 0.9999)
    """decay of the running means of the normalised gradient and of the gradient's square"""
    eps: PositiveFloat = 1e-6
    """least value of the denominator"""


@optimizers.register
class QHADOPT(ElementwiseConfig):
    """ADOPT whose update mixes the running mean with the newest normalised gradient."""

    implementation = "adopt:ADOPTOptimizer"

    name: Literal["qhadopt"] = "qhadopt"
    lr: NonNegativeFloat = 3e-3
    """peak learning rate; the schedule multiplies it"""
    betas: Betas = (0.999, 0.9999)
    """decay of the running means of the normalised gradient and of the gradient's square"""
    nu: Share = 0.9
    """weight of the running mean; the newest normalised gradient has the rest"""
    eps: PositiveFloat = 1e-6
    """least value of the denominator"""


@optimizers.register
class QHAdam(ElementwiseConfig):
    """AdamW with quasi-hyperbolic momentum (Ma & Yarats 2019, arXiv:1810.06801)."""

    implementation = "qhadam:QHAdamOptimizer"

    name: Literal["qhadam"] = "qhadam"
    betas: Betas = (0.995, 0.999)
    """decay of the running means of the gradient and of its square"""
    nus: tuple[Share, Share] = (0.7, 1.0)
    """weights of these means; the newest gradient and its square have the rest"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""


@optimizers.register
class Lion(ElementwiseConfig):
    """Steps by the sign of a mean gradient (Chen et al. 2023, arXiv:2302.06675)."""

    group_keys = frozenset({"lr", "weight_decay", "betas"})
    implementation = "lion:LionOptimizer"

    name: Literal["lion"] = "lion"
    lr: NonNegativeFloat = 1e-4
    """peak learning rate; the schedule multiplies it"""
    betas: Betas = (0.9, 0.99)
    """weight of the mean in the update, and decay of the mean"""


@optimizers.register
class AdEMAMix(ElementwiseConfig):
    """AdamW with a second, slow mean of the gradients (arXiv:2409.03137)."""

    implementation = "ademamix:AdEMAMixOptimizer"

    name: Literal["ademamix"] = "ademamix"
    betas: Betas = (0.9, 0.999)
    """decay of the fast mean of the gradient and of the mean of its square"""
    slow_beta: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """decay of the slow mean"""
    alpha: NonNegativeFloat = 5.0
    """weight of the slow mean beside the fast one"""
    slow_warmup_steps: CountOrZero = 0
    """steps over which `alpha` rises from 0, and the slow mean's decay from `betas[0]`"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""

    @model_validator(mode="after")
    def _starts_above_zero(self) -> AdEMAMix:
        if self.slow_warmup_steps and not self.betas[0]:
            raise ValueError("slow_warmup_steps begins at betas[0], which must be above 0")
        return self


def relative_decay(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> None:
    """Divide the decay of each group by its peak rate, whatever the rate's size then."""
    for group in groups:
        decay = group.get("weight_decay", config.weight_decay)
        group["weight_decay"] = decay / group["peak_lr"] if group["peak_lr"] else 0.0


@optimizers.register
class DecoupledAdamW(ElementwiseConfig):
    """AdamW whose decay does not scale with the peak rate: a step decays by `lr / peak * decay`."""

    name: Literal["decoupled_adamw"] = "decoupled_adamw"
    weight_decay: NonNegativeFloat = 1e-5
    """share of a weight that a step at the peak rate takes away"""
    betas: Betas = (0.9, 0.95)
    """decay of the running means of the gradient and of its square"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return AdamW with the decay that has the same effect."""
        from ..optimizers import AdamW

        relative_decay(self, groups)
        keys = {"lr", "weight_decay", "betas", "eps", "cautious_decay"}
        return AdamW(**self.model_dump(include=keys)).build(groups, device)


@optimizers.register
class DecoupledSGDW(ElementwiseConfig):
    """SGD whose decay enters neither the momentum nor scales with the peak rate."""

    group_keys = frozenset({"lr", "weight_decay", "momentum"})
    implementation = "sgdw:SGDW"

    name: Literal["decoupled_sgdw"] = "decoupled_sgdw"
    lr: NonNegativeFloat = 0.1
    """peak learning rate; the schedule multiplies it"""
    weight_decay: NonNegativeFloat = 1e-5
    """share of a weight that a step at the peak rate takes away"""
    momentum: NonNegativeFloat = 0.0
    """decay of the running mean of the gradient"""
    nesterov: bool = False
    """look ahead along the momentum"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return SGD with decoupled decay."""
        relative_decay(self, groups)
        return super().build(groups, device)
