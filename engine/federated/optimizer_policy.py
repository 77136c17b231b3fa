"""What becomes of the clients' optimizer state between rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.local import local
from .client import Client
from .layers.masks import Masks

State = defaultdict[Any, dict[str, Any]]


class OptimizerPolicy:
    """Gives the optimizer the state of the client that trains, as `client_optimizer` says.

    States are passed on without copies, except to be averaged.

    Args:
        policy: `federation.client_optimizer`.
        optimizer: the optimizer of the model.
        names: the name of each trained weight.
        masks: tells which states a round averages under "schedule".

    Attributes:
        shared: the averaged states: those with which each round starts under "aggregate", the
            newest of each under "schedule".
    """

    def __init__(
        self,
        policy: Literal["keep", "reset", "aggregate", "schedule"],
        optimizer: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        masks: Masks,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._names = names
        self._masks = masks
        self._number = 1
        self.shared: State = defaultdict(dict)
        self._mean: State = defaultdict(dict)
        self._total = 0.0

    @property
    def keeps(self) -> bool:
        """Whether each client keeps its own state between rounds."""
        return self._policy in ("keep", "schedule")

    def begin_round(self, number: int) -> None:
        """Tell the number of the round that begins, counted from 1."""
        self._number = number

    def count_received(self, client: Client) -> int:
        """Return the bytes of the averaged tensors that a client receives of this rank's weights.

        Args:
            client: the client, before it trains.
        """
        return sum(
            value.numel() * value.itemsize
            for weight, key, value in self._arriving(client)
            if _is_averaged(weight, value)
        )

    def _arriving(self, client: Client) -> Iterator[tuple[Any, str, Any]]:
        """Yield the averaged states that a client does not have: weight, key and value."""
        for weight, values in self.shared.items():
            for key, value in values.items():
                # A client's own mean counts as new too: what it has is its own state.
                if self._policy == "aggregate" or self._masks.is_averaged_since(
                    key, self._names[weight], max(client.last_round, 1), self._number - 1
                ):
                    yield weight, key, value

    @torch.no_grad()
    def begin(self, client: Client) -> None:
        """Let a client train with the state that its round starts with."""
        state: State = client.optimizer if self.keeps else defaultdict(dict)
        if self._policy == "aggregate":
            for weight, key, value in self._arriving(client):
                state[weight][key] = _copy(value)
        elif self._policy == "schedule":
            for weight, key, value in self._arriving(client):
                # A client without states starts with empty ones: an optimizer makes them together.
                if key in state[weight]:
                    local(state[weight][key]).copy_(local(value))
        self._optimizer.state = state

    @torch.no_grad()
    def end(self, weight: float) -> int:
        """Add the state of the client that has trained.

        Args:
            weight: weight of the client in the mean.

        Returns:
            bytes that a client sends of this rank's weights: those of the averaged tensors.
        """
        if self._policy not in ("aggregate", "schedule"):
            return 0
        self._total += weight
        share, sent = weight / self._total if self._total else 1.0, 0
        for parameter, values in self._optimizer.state.items():
            mean = self._mean[parameter]
            for key, value in values.items():
                is_moment = _is_averaged(parameter, value)
                if self.keeps and not (is_moment and self._is_due(parameter, key)):
                    continue
                if is_moment:
                    sent += value.numel() * value.itemsize
                if key in mean and is_moment:
                    local(mean[key]).lerp_(local(value), share)
                else:
                    # Under "aggregate" no one else uses the client's.
                    mean[key] = _copy(value) if self.keeps else value
        return sent

    def finish_round(self, steps: int) -> None:
        """Make the mean the state of the next round.

        Args:
            steps: optimizer steps of the run so far, which become the `step` of every parameter.
        """
        mean, self._mean, self._total = self._mean, defaultdict(dict), 0.0
        if self._policy == "schedule":
            for parameter, values in mean.items():
                self.shared[parameter].update(values)
        if self._policy != "aggregate":
            return
        self.shared = mean
        for values in self.shared.values():
            if isinstance(values.get("step"), Tensor):
                values["step"].fill_(steps)

    def _is_due(self, parameter: Tensor, key: str) -> bool:
        return self._masks.is_averaged(key, self._names[parameter], self._number)

    def forget(self, parameters: Iterable[Tensor], clients: Iterable[Client]) -> None:
        """Drop the states of weights that are drawn again, on all clients."""
        for parameter in parameters:
            self.shared.pop(parameter, None)
            for client in clients:
                client.optimizer.pop(parameter, None)


def _is_averaged(parameter: Tensor, value: Any) -> bool:
    """Return whether a value is a moment: a floating-point tensor of the parameter's shape."""
    is_tensor = isinstance(value, Tensor) and value.is_floating_point()
    return is_tensor and value.shape == parameter.shape and value.ndim > 0


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
