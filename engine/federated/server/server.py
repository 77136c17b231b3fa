"""The server's side of a round: global weights, what arrives, how it is merged, the outer step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import isfinite

import torch
from torch import Tensor

from ...core.local import local
from ..client import Client
from ..compression.compressor import Compressor
from ..layers.masks import Masks
from ..merge.admission import find_outliers
from ..merge.geometry import Geometry, Gradient
from ..tables import Federation
from .arrival import Arrival


class Server:
    """Holds the global weights and the states of the server optimizer, on this rank.

    For a plain mean, pseudo-gradients are averaged as they come, in fp32 and in the order of client
    number, with one copy of the weights for the mean and one more for what has arrived. Other
    merges, and screens that compare updates, hold all of a round.

    Args:
        table: the recipe's `[federation]`.
        model: the weights of the model that clients train, by name; clients receive the global
            weights in them, and leave their own there.
        buffers: the buffers that are averaged, by name; no optimizer moves them.
        geometry: measures pseudo-gradients over all ranks.
        masks: tells what a round merges.

    Attributes:
        weights: the global weights, and buffers.
        model: the tensors of the model, those of buffers among them.
        states: the tensors of the server optimizer, by weight and state.
        active: the weights that the round merges, and the buffers.
        merged_norm: L2 norm of the last merged pseudo-gradient.
        merged_bytes: payload of the last merged pseudo-gradient, compressed; 0: there is none.
    """

    def __init__(
        self,
        table: Federation,
        model: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        geometry: Geometry,
        masks: Masks,
    ) -> None:
        self.masks = masks
        self._config = table.server
        self._admission = table.admission
        self._rule = table.merge.build()
        self._geometry = geometry
        self.model = {**model, **buffers}
        self.weights = {name: tensor.detach().clone() for name, tensor in self.model.items()}
        self.states = {name: self._config.begin(self.weights[name]) for name in model}
        codec = table.compression.build()
        feedback = table.compression.feedback
        self._buffers = frozenset(buffers)
        self.active = masks.merged_in(1) | self._buffers
        self.compressor = Compressor(codec, {n: self.weights[n] for n in model}, feedback=feedback)
        self.merged_norm = 0.0
        self.merged_bytes = 0
        self._waits = table.simulates_time or table.cosines
        self._measures_cosines = table.cosines
        self._late: frozenset[int] = frozenset()
        self._arrivals: list[Arrival] = []
        self._mean: dict[str, Tensor] = {}
        self._totals: dict[str, float] = {}

    def begin_round(self, number: int, late: Iterable[int] = ()) -> None:
        """Choose the weights that a round merges.

        Args:
            number: number of the round, counted from 1.
            late: numbers of the clients whose update of this round a later one merges.
        """
        self._late = frozenset(late)
        self.active = self.masks.merged_in(number) | self._buffers

    @torch.no_grad()
    def mix_in(self, names: Iterable[str], share: float) -> None:
        """Move weights of the model towards the global ones.

        Args:
            names: the weights.
            share: share of the model's own weights in the result.
        """
        for name in names:
            own, weight = local(self.model[name]), local(self.weights[name])
            own.copy_(weight) if share == 0 else own.lerp_(weight, 1 - share)

    @torch.no_grad()
    def restart(self, names: Iterable[str]) -> None:
        """Take weights of the model as global ones that no round has merged yet."""
        self.take_weights(names)
        for name in names:
            for key, state in self._config.begin(self.weights[name]).items():
                local(self.states[name][key]).copy_(local(state))

    @property
    def holds_updates(self) -> bool:
        """Whether all updates of a round are there before any is merged or rejected."""
        return self._rule is not None or self._admission.compares or self._waits

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give the model the global weights."""
        for name, weight in self.weights.items():
            local(self.model[name]).copy_(local(weight))

    @torch.no_grad()
    def take_weights(self, names: Iterable[str] | None = None) -> None:
        """Take weights of the model as the global weights; without names, all."""
        for name in self.weights if names is None else names:
            local(self.weights[name]).copy_(local(self.model[name]))

    @torch.no_grad()
    def receive(
        self,
        client: Client,
        weight: float,
        tokens: Mapping[str, float] | None = None,
        absent: Collection[str] = (),
    ) -> Arrival:
        """Take the update of the client whose weights the model has.

        Args:
            client: the client.
            weight: weight of the client in the mean.
            tokens: other weights, of the tensors of experts, by name.
            absent: names of the tensors that the client does not hold.
        """
        arrival, gradient = self.collect(client, weight, absent=absent)
        if client.number in self._late and not arrival.rejected:
            arrival.is_late, client.late_weight = True, weight
            for name, value in gradient.items():
                client.late[name] = torch.empty_like(self.weights[name])
                local(client.late[name]).copy_(value)
        else:
            self.admit(arrival, gradient, tokens or {})
        return arrival

    @torch.no_grad()
    def collect(
        self,
        client: Client,
        weight: float,
        payloads: dict[str, Tensor] | None = None,
        absent: Collection[str] = (),
    ) -> tuple[Arrival, Gradient]:
        """Return the update of the client whose weights the model has, without taking it.

        Args:
            client: the client.
            weight: weight of the client in the mean.
            payloads: gets what the compression has encoded, by weight.
            absent: names of the tensors that the client does not hold.
        """
        gradient: Gradient = {
            name: local(start) - local(self.model[name])
            for name, start in self.weights.items()
            if name in self.active and name not in absent
        }
        gradient, sent = self.compressor.send(client.error, gradient, payloads)
        arrival = Arrival(client, weight, self._geometry.norm(gradient), sent)
        buffers = (gradient[name] for name in gradient.keys() - self.states.keys())
        if not isfinite(arrival.norm) or not all(each.isfinite().all() for each in buffers):
            arrival.rejected = "its update is not finite"
        return arrival, gradient

    @torch.no_grad()
    def admit(
        self, arrival: Arrival, gradient: Gradient, tokens: Mapping[str, float] | None = None
    ) -> None:
        """Take an update that was collected, here or by the ranks of its client."""
        self._arrivals.append(arrival)
        if arrival.rejected:
            return
        if self.holds_updates:
            arrival.gradient = gradient
        else:
            self._add_to_mean(gradient, arrival.weight, tokens)

    def admit_mean(self, arrivals: Iterable[Arrival], mean: Mapping[str, Tensor]) -> None:
        """Take all updates of a round, whose weighted mean was computed elsewhere."""
        self._arrivals.extend(arrivals)
        self._mean = dict(mean)

    def receive_late(self, client: Client, factor: float) -> None:
        """Take the update that a client has computed in an earlier round.

        Args:
            client: the client.
            factor: multiplies the weight of the update.
        """
        if client.late:  # one that is not finite was never kept
            gradient: Gradient = {name: local(value) for name, value in client.late.items()}
            weight, norm = client.late_weight * factor, self._geometry.norm(gradient)
            self._arrivals.append(Arrival(client, weight, norm, 0, gradient=gradient))
            client.late = {}

    def _add_to_mean(
        self, gradient: Gradient, weight: float, tokens: Mapping[str, float] | None = None
    ) -> None:
        """Move the weighted mean of what has come so far towards an update, by its share."""
        for name, value in gradient.items():
            own = weight if tokens is None else tokens.get(name, weight)
            total = self._totals[name] = self._totals.get(name, 0.0) + own
            if name in self._mean:
                self._mean[name].lerp_(value, own / total if total else 1.0)
            else:
                self._mean[name] = value  # of one client the mean is exactly that client's

    @torch.no_grad()
    def step(self, number: int) -> list[Arrival]:
        """Merge the round, apply the server optimizer, and begin another round.

        Without an update that is admitted, nothing changes.

        Args:
            number: number of the round, counted from 1.

        Returns:
            all updates of the round, and which were rejected.
        """
        # Sums are in the order of client number, and some updates are of earlier rounds.
        arrivals = sorted(self._arrivals, key=lambda arrival: arrival.client.number)
        self._arrivals = []
        if self._measures_cosines:
            self._measure_cosines([each for each in arrivals if each.gradient is not None])
        merged = self._merge(arrivals)
        for arrival in arrivals:
            arrival.gradient = None
        self.merged_norm, self.merged_bytes = 0.0, 0
        if not merged:
            return arrivals
        merged, self.merged_bytes = self.compressor.send_back(merged)
        self.merged_norm = self._geometry.norm(merged)
        is_alone = len(arrivals) == 1 and not self.holds_updates and not self.compressor.is_lossy
        if is_alone and self._config.assigns_mean:
            self.take_weights(self.active)  # x - (x - mean) would round
            return arrivals
        for name, gradient in merged.items():
            weight = local(self.weights[name])
            if name in self.states:
                states = {key: local(state) for key, state in self.states[name].items()}
                steps = self.masks.count_merges(name, number)
                self._config.update(weight, gradient, states, steps)
            else:
                weight.sub_(gradient)
        return arrivals

    def _measure_cosines(self, arrivals: list[Arrival]) -> None:
        """Tell each update the cosines with the others."""
        for index, one in enumerate(arrivals):
            for other in arrivals[:index]:
                assert one.gradient is not None
                assert other.gradient is not None
                product = self._geometry.product(one.gradient, other.gradient)
                cosine = product / (one.norm * other.norm) if one.norm and other.norm else 0.0
                one.cosines[other.client.name] = other.cosines[one.client.name] = cosine

    def _merge(self, arrivals: list[Arrival]) -> dict[str, Tensor]:
        """Return the merged pseudo-gradient; empty if no update is admitted."""
        held = [each for each in arrivals if each.gradient is not None]
        gradients = [each.gradient for each in held if each.gradient is not None]
        reasons = find_outliers(self._admission, gradients, self._geometry)
        for arrival, reason in zip(held, reasons, strict=True):
            arrival.rejected = reason
            if not reason and self._rule is None and arrival.gradient is not None:
                self._add_to_mean(arrival.gradient, arrival.weight)
        admitted = [each for each in held if not each.rejected]
        if self._rule is not None and admitted:
            chosen = [each.gradient for each in admitted if each.gradient is not None]
            return self._rule.merge(chosen, [each.weight for each in admitted], self._geometry)
        mean, self._mean, self._totals = self._mean, {}, {}
        return mean
