"""What becomes of the clients' optimizer state between rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        self._rows: dict[Tensor, Any] = {}

    @property
    def keeps(self) -> bool:
        """Whether each client keeps its own state between rounds."""
        return self._policy in ("keep", "schedule")

    def begin_round(self, number: int) -> None:
        """Tell the number of the round that begins, counted from 1."""
        self._number = number

    def count_received(
        self, client: Client, share_of: Callable[[str], float] = lambda name: 1.0
    ) -> int:
        """Return the bytes of the averaged tensors that a client receives of this rank's weights.

        Args:
            client: the client, before it trains.
            share_of: returns the share of a weight that the client holds, by name.
        """
        return sum(
            int(value.numel() * value.itemsize * share_of(self._stacked_name(weight)))
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

    def take(self, client: Client, state: State) -> None:
        """Take the state with which another process has ended a client's round."""
        self._optimizer.state = state
        if self.keeps:
            client.optimizer = state

    @torch.no_grad()
    def end(
        self, weight: float, rows_of: Callable[[str], Tensor | None] = lambda name: None
    ) -> int:
        """Add the state of the client that has trained.

        Args:
            weight: weight of the client in the mean.
            rows_of: returns the weight of each expert of a weight that is stacked, [E], by name.

        Returns:
            bytes that a client sends of this rank's weights: those of the averaged tensors.
        """
        if self._policy not in ("aggregate", "schedule"):
            return 0
        self._total += weight
        share, sent = weight / self._total if self._total else 1.0, 0
        for parameter, values in self._optimizer.state.items():
            mean = self._mean[parameter]
            shares, held = self._share_rows(parameter, rows_of(self._stacked_name(parameter)))
            for key, value in values.items():
                is_moment = _is_averaged(parameter, value)
                if self.keeps and not (is_moment and self._is_due(parameter, key)):
                    continue
                if is_moment:
                    sent += int(value.numel() * value.itemsize * held)
                if key in mean and is_moment and shares is not None:
                    wide = shares.to(value).view(-1, *[1] * (value.ndim - 1))
                    mean[key].lerp_(value, wide)
                elif key in mean and is_moment:
                    local(mean[key]).lerp_(local(value), share)
                else:
                    # Under "aggregate" no one else uses the client's.
                    mean[key] = _copy(value) if self.keeps else value
        return sent

    def _stacked_name(self, parameter: Tensor) -> str:
        return self._names[parameter].removesuffix(".0")

    def _share_rows(self, parameter: Tensor, rows: Tensor | None) -> tuple[Tensor | None, float]:
        """Return the share of each expert in its mean so far, and the share of experts held."""
        if rows is None:
            return None, 1.0
        total = self._rows[parameter] = self._rows.get(parameter, 0.0) + rows
        return rows / total.clamp(min=1e-30), float((rows > 0).float().mean())

    def finish_round(self, steps: int) -> None:
        """Make the mean the state of the next round.

        Args:
            steps: optimizer steps of the run so far, which become the `step` of every parameter.
        """
        mean, self._mean, self._total = self._mean, defaultdict(dict), 0.0
        self._rows = {}
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
