"""The registry of server optimizers. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from ...core.config import Component
from ...core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

PositiveFloat = Annotated[float, Field(gt=0)]


class ServerOptimizerConfig(Component):
    """Base of every server optimizer: the outer step of a round.

    The pseudo-gradient of a round is the global weights minus the mean of the clients' weights: it
    points uphill, as a gradient does. Every rule is elementwise, so that each rank applies it to
    its shards alone.
    """

    states: ClassVar[tuple[str, ...]] = ()
    """names of the tensors that it keeps for each weight, of the weight's shape, in fp32"""

    lr: PositiveFloat = 1.0
    """server learning rate"""

    @property
    def assigns_mean(self) -> bool:
        """Whether the new weights are the mean of the clients' weights, by definition."""
        return False

    def begin(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the states of a weight before the first round: zeros, [weight's shape]."""
        return {name: weight.new_zeros(weight.shape) for name in self.states}

    def update(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], step: int) -> None:
        """Change a weight and its states in place.

        Args:
            weight: the global weight, or this rank's shard.
            gradient: the pseudo-gradient, of the same shape; it may be overwritten.
            state: the tensors that `begin` returned.
            step: number of the round, counted from 1.
        """
        raise NotImplementedError


server_optimizers: Registry[ServerOptimizerConfig] = Registry(
    "server_optimizer",
    default="fedavg",
    built_in={
        "fedavg": "engine.federated.server.optimizers:FedAvg",
        "fedavgm": "engine.federated.server.optimizers:FedAvgM",
        "fedmom": "engine.federated.server.optimizers:FedMom",
        "fednesterov": "engine.federated.server.optimizers:FedNesterov",
        "fedadam": "engine.federated.server.optimizers:FedAdam",
        "fedyogi": "engine.federated.server.optimizers:FedYogi",
    },
)
