"""Server optimizers. Sources: McMahan et al. 2017 (FedAvg), Huo et al. 2020 (FedMom,
arXiv:2002.02090), Reddi et al. 2020 (FedAdam and FedYogi, arXiv:2003.00295, algorithm 2), Douillard
et al. 2023 (Nesterov as DiLoCo's outer optimizer, arXiv:2311.08105).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ...core.config import Betas, Decay
from .tables import PositiveFloat, ServerOptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor


class FedAvg(ServerOptimizerConfig):
    """Moves the weights along the pseudo-gradient; with lr = 1 they become the clients' mean."""

    name: Literal["fedavg"] = "fedavg"

    @property
    def assigns_mean(self) -> bool:
        """Whether the new weights are the mean of the clients' weights, by definition."""
        return self.lr == 1.0

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Change a weight in place."""
        weight.sub_(gradient, alpha=self.lr)


class FedAvgM(ServerOptimizerConfig):
    """Heavy-ball momentum on the pseudo-gradient."""

    states: ClassVar[tuple[str, ...]] = ("momentum",)

    name: Literal["fedavgm"] = "fedavgm"
    momentum: Decay = 0.9
    """share of the momentum that each round keeps"""

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Change a weight and its momentum in place."""
        momentum = state["momentum"].mul_(self.momentum).add_(gradient)
        weight.sub_(momentum, alpha=self.lr)


class FedNesterov(ServerOptimizerConfig):
    """Nesterov momentum on the pseudo-gradient, in torch.optim.SGD's form."""

    states: ClassVar[tuple[str, ...]] = ("momentum",)

    name: Literal["fednesterov"] = "fednesterov"
    lr: PositiveFloat = 0.7
    """server learning rate"""
    momentum: Decay = 0.9
    """share of the momentum that each round keeps"""

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Change a weight and its momentum in place."""
        momentum = state["momentum"].mul_(self.momentum).add_(gradient)
        weight.sub_(gradient.add_(momentum, alpha=self.momentum), alpha=self.lr)


class FedMom(ServerOptimizerConfig):
    """Nesterov momentum in the form that keeps the point before the momentum is added."""

    states: ClassVar[tuple[str, ...]] = ("point",)

    name: Literal["fedmom"] = "fedmom"
    lr: PositiveFloat = 0.7
    """server learning rate"""
    momentum: Decay = 0.9
    """share of the last movement that is added"""

    def begin(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the starting point: the initial weight."""
        # Zeros would multiply the weight by 1 + momentum in the first round.
        return {"point": weight.clone()}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Change a weight and its point in place."""
        point = weight.sub(gradient, alpha=self.lr)
        weight.copy_(point.add(point - state["point"], alpha=self.momentum))
        state["point"].copy_(point)


class FedAdam(ServerOptimizerConfig):
    """Adam on the pseudo-gradient."""

    states: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    name: Literal["fedadam"] = "fedadam"
    lr: PositiveFloat = 1e-3
    """server learning rate; in the first rounds a weight moves by about so much"""
    betas: Betas = (0.9, 0.99)
    """decay of the first and of the second moment"""
    tau: PositiveFloat = 1e-3
    """added to the root of the second moment: the degree of adaptivity"""
    bias_correction: Literal["none", "adam"] = "none"
    """"none": as in the paper; "adam": both moments are divided by 1 - beta^round"""

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Change a weight and its moments in place."""
        beta1, beta2 = self.betas
        # Of the pseudo-gradient g itself, where the paper has -g: the sign moves to the last line.
        first = state["first_moment"].lerp_(gradient, 1 - beta1)
        second = state["second_moment"]
        self.update_second_moment(second, gradient.square(), beta2)
        scale, root = self.lr, second.sqrt()
        if self.bias_correction == "adam":
            scale = self.lr / (1 - beta1**step)
            root = root / (1 - beta2**step) ** 0.5
        weight.addcdiv_(first, root + self.tau, value=-scale)

    def update_second_moment(self, second: Tensor, square: Tensor, beta: float) -> None:
        """Change the second moment in place.

        Args:
            second: the second moment.
            square: the squared pseudo-gradient.
            beta: decay of the second moment.
        """
        second.lerp_(square, 1 - beta)


class FedYogi(FedAdam):
    """Yogi on the pseudo-gradient: the second moment changes by no more than the new square."""

    name: Literal["fedyogi"] = "fedyogi"  # type: ignore[assignment] # a component has one name

    def update_second_moment(self, second: Tensor, square: Tensor, beta: float) -> None:
        """Change the second moment in place."""
        second.sub_(square * (second - square).sign(), alpha=1 - beta)
