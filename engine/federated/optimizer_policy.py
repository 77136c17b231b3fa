"""What becomes of the clients' optimizer state between rounds."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.local import local
from .client import Client

State = defaultdict[Any, dict[str, Any]]


class OptimizerPolicy:
    """Gives the optimizer the state of the client that trains, as `client_optimizer` says.

    States are passed on without copies, except to be averaged.

    Args:
        policy: `federation.client_optimizer`.
        optimizer: the optimizer of the model.

    Attributes:
        shared: the averaged state with which each round starts under "aggregate".
    """

    def __init__(
        self, policy: Literal["keep", "reset", "aggregate"], optimizer: torch.optim.Optimizer
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self.shared: State = defaultdict(dict)
        self._mean: State = defaultdict(dict)
        self._total = 0.0

    @property
    def keeps(self) -> bool:
        """Whether each client keeps its own state between rounds."""
        return self._policy == "keep"

    @property
    def shared_bytes(self) -> int:
        """Bytes of the averaged tensors that a client receives of this rank's weights."""
        return sum(
            value.numel() * value.itemsize
            for weight, values in self.shared.items()
            for value in values.values()
            if _is_averaged(weight, value)
        )

    def begin(self, client: Client) -> None:
        """Let a client train with the state that its round starts with."""
        state: State = client.optimizer if self._policy == "keep" else defaultdict(dict)
        if self._policy == "aggregate":
            for weight, values in self.shared.items():
                state[weight] = {key: _copy(value) for key, value in values.items()}
        self._optimizer.state = state

    @torch.no_grad()
    def end(self, weight: float) -> int:
        """Add the state of the client that has trained.

        Args:
            weight: weight of the client in the mean.

        Returns:
            bytes that a client sends of this rank's weights: those of the averaged tensors.
        """
        if self._policy != "aggregate":
            return 0
        self._total += weight
        share, sent = weight / self._total if self._total else 1.0, 0
        for parameter, values in self._optimizer.state.items():
            mean = self._mean[parameter]
            for key, value in values.items():
                if _is_averaged(parameter, value):
                    sent += value.numel() * value.itemsize
                if key in mean and _is_averaged(parameter, value):
                    local(mean[key]).lerp_(local(value), share)
                else:
                    mean[key] = value  # a copy of the client's, which no one else uses
        return sent

    def finish_round(self, steps: int) -> None:
        """Make the mean the state of the next round.

        Args:
            steps: optimizer steps of the run so far, which become the `step` of every parameter.
        """
        if self._policy != "aggregate":
            return
        self.shared, self._mean, self._total = self._mean, defaultdict(dict), 0.0
        for values in self.shared.values():
            if isinstance(values.get("step"), Tensor):
                values["step"].fill_(steps)


def _is_averaged(parameter: Tensor, value: Any) -> bool:
    """Return whether a value is a moment: a floating-point tensor of the parameter's shape."""
    is_tensor = isinstance(value, Tensor) and value.is_floating_point()
    return is_tensor and value.shape == parameter.shape and value.ndim > 0


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
