"""Tables of the optimizers that update each element on its own. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...core.config import Betas, CountOrZero
from ..optimizers import AdamW
from ..tables import (
    NonNegativeFloat,
    OptimizerConfig,
    PositiveFloat,
    StateDtype,
    optimizers,
    warn_of_slow_means,
)

if TYPE_CHECKING:
    import torch

Share = Annotated[float, Field(ge=0, le=1)]


class ElementwiseConfig(OptimizerConfig):
    """Base of the tables of optimizers that `ElementwiseOptimizer` implements."""

    group_keys = frozenset({"lr", "weight_decay", "betas", "eps"})
    implementation: ClassVar[str]
    """module and class of the optimizer, whose options are the keys of this table"""

    cautious_decay: bool = False
    """decay only the elements that the update moves towards 0 (arXiv:2510.12402)"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over torch parameter groups."""
        module, name = self.implementation.split(":")
        make: Callable[..., torch.optim.Optimizer]
        make = getattr(import_module(f".{module}", __package__), name)
        return make(
            groups, **self.model_dump(exclude={"name", "clip_norm", "clip_value", "groups"})
        )


class NarrowStateConfig(ElementwiseConfig):
    """Base of the tables whose optimizers can keep their running means in fewer bits."""

    state_dtype: StateDtype = "fp32"
    """dtype of the running means: "fp32" (that of the weights), "bf16", or "int8" with a scale for
    each block of up to 256 elements of a row (arXiv:2110.02861)"""

    def warnings(self) -> Iterator[str]:
        """Yield what is likely to be a mistake."""
        keys = {"betas", "slow_beta", "momentum"} & type(self).model_fields.keys()
        values = [getattr(self, key) for key in keys]
        decays = [max(each) if isinstance(each, tuple) else each for each in values]
        yield from warn_of_slow_means(self.state_dtype, decays)


@optimizers.register
class ADOPT(NarrowStateConfig):
    """Adam that converges with any beta2 (Taniguchi et al. 2024, arXiv:2411.02853)."""

    implementation = "adopt:ADOPTOptimizer"

    name: Literal["adopt"] = "adopt"
    lr: NonNegativeFloat = 1e-3
    """peak learning rate; the schedule multiplies it"""
    betas: Betas = (0.9, 0.9999)
    """decay of the running means of the normalized gradient and of the gradient's square"""
    eps: PositiveFloat = 1e-6
    """least value of the denominator"""


@optimizers.register
class QHADOPT(NarrowStateConfig):
    """ADOPT whose update averages the running mean and the newest normalized gradient."""

    implementation = "adopt:ADOPTOptimizer"

    name: Literal["qhadopt"] = "qhadopt"
    lr: NonNegativeFloat = 3e-3
    """peak learning rate; the schedule multiplies it"""
    betas: Betas = (0.999, 0.9999)
    """decay of the running means of the normalized gradient and of the gradient's square"""
    nu: Share = 0.9
    """weight of the running mean; the newest normalized gradient gets the remaining weight"""
    eps: PositiveFloat = 1e-6
    """least value of the denominator"""


@optimizers.register
class QHAdam(NarrowStateConfig):
    """AdamW with quasi-hyperbolic momentum (Ma & Yarats 2019, arXiv:1810.06801)."""

    implementation = "qhadam:QHAdamOptimizer"

    name: Literal["qhadam"] = "qhadam"
    betas: Betas = (0.995, 0.999)
    """decay of the running means of the gradient and of its square"""
    nus: tuple[Share, Share] = (0.7, 1.0)
    """weight of each running mean; the newest gradient and its square get the remaining weight"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""


@optimizers.register
class Lion(NarrowStateConfig):
    """Steps by the sign of a mean gradient (Chen et al. 2023, arXiv:2302.06675)."""

    group_keys = frozenset({"lr", "weight_decay", "betas"})
    implementation = "lion:LionOptimizer"

    name: Literal["lion"] = "lion"
    lr: NonNegativeFloat = 1e-4
    """peak learning rate; the schedule multiplies it"""
    betas: Betas = (0.9, 0.99)
    """weight of the mean in the update, and decay of the mean"""


@optimizers.register
class AdEMAMix(NarrowStateConfig):
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
    def _check_warmup_start(self) -> AdEMAMix:
        if self.slow_warmup_steps and not self.betas[0]:
            raise ValueError("slow_warmup_steps begins at betas[0], which must be above 0")
        return self


@optimizers.register
class MARS(ElementwiseConfig):
    """AdamW on gradients of reduced variance (Yuan et al. 2024, arXiv:2411.10438)."""

    implementation = "mars:MARSOptimizer"

    name: Literal["mars"] = "mars"
    lr: NonNegativeFloat = 3e-3
    """peak learning rate; the schedule multiplies it"""
    betas: Betas = (0.95, 0.99)
    """decay of the running means of the corrected gradient and of its square"""
    gamma: NonNegativeFloat = 0.025
    """strength of the correction by the gradient of the step before"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""


@optimizers.register
class ScheduleFree(OptimizerConfig):
    """AdamW that averages its weights instead of lowering the rate (arXiv:2405.15682)."""

    group_keys = frozenset({"lr", "weight_decay", "betas", "eps"})
    averages_weights = True

    name: Literal["schedule_free"] = "schedule_free"
    lr: NonNegativeFloat = 2.5e-3
    """learning rate after the warmup"""
    betas: Betas = (0.9, 0.999)
    """weight of the mean in the trained weights, above 0, and decay of the mean of squares"""
    eps: PositiveFloat = 1e-8
    """added to the denominator"""

    @model_validator(mode="after")
    def _check_share(self) -> ScheduleFree:
        for betas in [self.betas, *(group.betas for group in self.groups if group.betas)]:
            if not betas[0]:
                raise ValueError("betas[0] must be above 0: the mean is computed back by it")
        return self

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return the optimizer over torch parameter groups."""
        from .schedule_free import ScheduleFreeOptimizer

        keys = {"lr", "weight_decay", "betas", "eps"}
        return ScheduleFreeOptimizer(groups, **self.model_dump(include=keys))


def divide_decay(config: OptimizerConfig, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups whose weight decay is divided by their peak learning rate.

    An optimizer that decays by `lr * weight_decay` then decays by `lr / peak_lr` of the original
    value. A group with a peak rate of 0 does not decay.
    """
    found = []
    for group in groups:
        decay, peak = group.get("weight_decay", config.weight_decay), group["peak_lr"]
        found.append({**group, "weight_decay": decay / peak if peak else 0.0})
    return found


@optimizers.register
class DecoupledAdamW(AdamW):
    """AdamW whose decay does not depend on the peak rate: a step decays by `lr / peak * decay`."""

    name: Literal["decoupled_adamw"] = "decoupled_adamw"  # type: ignore[assignment]
    weight_decay: NonNegativeFloat = 1e-5
    """share of a weight that a step at the peak rate takes away"""

    def build(
        self, groups: Sequence[dict[str, Any]], device: torch.device
    ) -> torch.optim.Optimizer:
        """Return AdamW with the weight decay that has the same effect."""
        return super().build(divide_decay(self, groups), device)


@optimizers.register
class DecoupledSGDW(NarrowStateConfig):
    """SGD whose decay neither enters the momentum nor depends on the peak rate."""

    group_keys = frozenset({"lr", "weight_decay", "momentum"})
    implementation = "sgdw:SGDWOptimizer"

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
        return super().build(divide_decay(self, groups), device)
