"""The carrier "local": clients train one after another where the server is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.local import local
from ...launch.signals import StopFlag
from ...train.average import reshard
from ...train.parts import Parts, Position
from ..client import Client, LocalResult, train_locally
from ..federation_parts import FederationParts
from ..server.arrival import Arrival
from ..server.server import Server
from ..tables import Federation
from .client_ranks import ClientRanks


@dataclass(frozen=True)
class ClientUpdate:
    """What the server knows of a client's round.

    Attributes:
        arrival: the update as it reached the server.
        result: the numbers of its training.
        bytes_sent: payload from the client to the server.
        bytes_received: payload from the server to the client.
    """

    arrival: Arrival
    result: LocalResult
    bytes_sent: int
    bytes_received: int


class LocalCarrier:
    """Trains clients in turn with the one model and optimizer of this process or its ranks.

    Nothing is sent: payloads are made, and their bytes counted, as if clients were elsewhere.

    Args:
        table: the recipe's `[federation]`.
        parts: the parts of one client's plan.
        members: clients and server.
        ranks: the clients whose state this rank keeps.
        report: shows a message to the user.
    """

    def __init__(
        self,
        table: Federation,
        parts: Parts,
        members: FederationParts,
        ranks: ClientRanks,
        report: Callable[[str], None],
    ) -> None:
        self._ranks = ranks
        self._table = table
        self._parts = parts
        self._clients = members.clients
        self._server = server = members.server
        self._policy = members.policy
        self._held = held = members.held
        self._experts = members.experts
        self._report = report
        for client in members.clients:
            if ranks.owns(client.number):
                held.begin(client)
                held.end(client)
        self._stale = table.fragments if table.keeps_weights else None
        shared = {n: w for n, w in server.weights.items() if n not in server.masks.personal}
        self._bytes = count_bytes(parts, server, shared)
        states = {name: tensor for name, each in server.states.items() for tensor in each.values()}
        self._state_bytes = count_bytes(parts, server, states) * len(table.server.states)

    def running(self) -> AbstractContextManager[None]:
        """Return a context around all rounds: what trains clients elsewhere ends with it."""
        return nullcontext()

    def catch_up(self, position: Position, check: Callable[[], None]) -> bool:
        """Receive what clients elsewhere have done without this one; return whether they have.

        Args:
            position: the position of the run, which may change.
            check: called while this waits; what it raises ends the wait.
        """
        return False

    def run_round(
        self, chosen: Sequence[int], position: Position, check: Callable[[], None]
    ) -> Iterator[ClientUpdate]:
        """Train the clients of a round and add their updates to the server's mean, in their order.

        Args:
            chosen: numbers of the clients, ascending.
            position: the position of the run at the start of the round.
            check: called before each optimizer step; what it raises ends the round.
        """
        current = position.step // self._parts.stride + 1
        self._policy.begin_round(current)
        experts, tokens, absent = self._experts, dict[str, float](), list[str]()
        if experts:
            experts.begin_round(current, chosen)
        for number in chosen:
            client = self._clients[number]
            if experts:
                experts.begin(number)
                absent = experts.not_held()
            received = self._count_received(client, position, absent)
            result = self.train_client(client, position, check)
            if experts:
                tokens = experts.end()
            weight = self._weigh(result)
            arrival = self._server.receive(client, weight, tokens, absent)
            client.last_round = current
            self._held.end(client)
            states = 0 if arrival.rejected else self._policy.end(weight, self._rows_of(tokens))
            sent = self._sum_bytes(arrival.bytes_sent + states)
            yield ClientUpdate(arrival, result, sent, received)
        self._policy.finish_round(position.step + self._parts.stride)

    def forget(self, names: Sequence[str]) -> None:
        """Let clients drop what they keep of weights that were drawn again."""
        weights = dict(self._parts.model.named_parameters())
        self._policy.forget([weights[name] for name in names], self._clients)
        for client in self._clients:
            for name in names:
                client.weights.pop(name, None)
                if name in client.error:
                    local(client.error[name]).zero_()

    def wants_stop(self, stop: StopFlag) -> bool:
        """Return whether a signal asks to end a round before its end, on any rank of a client."""
        return stop.agree()

    def train_client(
        self, client: Client, position: Position, check: Callable[[], None]
    ) -> LocalResult:
        """Run a client's steps of a round; the model has its weights then."""
        self._server.broadcast()
        self._policy.begin(client)
        self._held.begin(client)
        current = position.step // self._parts.stride + 1
        before_step = self._restore_weights(client, current, check)
        result = train_locally(self._parts, client, position, before_step)
        self._keep_weights(client)
        if self._experts:
            self._experts.after_step(self._server.model, self._server.weights)
        return result

    @torch.no_grad()
    def _restore_weights(
        self, client: Client, number: int, check: Callable[[], None]
    ) -> Callable[[int], None]:
        """Give the model a client's own weights, where it keeps them between rounds.

        Returns:
            what is called before each step, with the number of finished steps of the round: it lets
            the fragment that the last round has merged arrive.
        """
        fragments, server, experts = self._stale, self._server, self._experts
        if experts:

            def after_step(done: int) -> None:
                check()
                if done:
                    experts.after_step(server.model, server.weights)

            return after_step
        if fragments is None or not client.weights:
            return lambda done: check()
        for name, weight in client.weights.items():
            local(server.model[name]).copy_(local(weight))
        arriving = server.masks.merged_since(client.last_round, number - 1)

        def before_step(done: int) -> None:
            check()
            if done == fragments.delay:
                reshard(self._parts.model)
                server.mix_in(arriving, fragments.mixing)

        return before_step

    @torch.no_grad()
    def _keep_weights(self, client: Client) -> None:
        """Let a client keep the weights with which it ends a round."""
        if self._stale is not None:
            for name in self._server.masks.kept:
                weight = self._server.model[name]
                kept = client.weights.setdefault(name, torch.empty_like(weight.detach()))
                local(kept).copy_(local(weight))

    def _rows_of(self, tokens: Mapping[str, float]) -> Callable[[str], Tensor | None]:
        """Return what gives the weights of the experts of a stacked weight."""
        experts = self._experts
        return lambda name: experts.rows_of(tokens, name) if experts else None

    def _weigh(self, result: LocalResult) -> float:
        if self._table.weighting == "uniform":
            return 1.0
        samples = self._parts.loader.turns.count_samples(self._parts.stride)
        return float(result.count if self._table.weighting == "tokens" else samples)

    def _count_received(
        self, client: Client, position: Position, absent: Sequence[str] = ()
    ) -> int:
        """Return the bytes that a client receives at the start of a round.

        With compression, a client that trained in the round before steps by itself from the merged
        pseudo-gradient; any other one receives weights and outer states. With fragments, a client
        receives the one that was merged.
        """
        share_of = self._experts.share_of if self._experts else lambda name: 1.0
        shared = self._sum_bytes(self._policy.count_received(client, share_of))
        server = self._server
        finished = position.step // self._parts.stride
        follows = finished and client.last_round == finished
        if follows and (server.compressor.is_lossy or self._stale):
            return self._sum_bytes(server.merged_bytes) + shared
        weights = self._bytes - sum(
            server.weights[name].numel() * server.weights[name].itemsize
            for name in absent
            if name in server.weights
        )
        if not server.compressor.is_lossy:
            return weights + shared
        return weights + shared + (self._state_bytes if finished else 0)

    def _sum_bytes(self, own: int) -> int:
        return sum_over_stages(self._parts, own) if own else 0


def count_bytes(parts: Parts, server: Server, tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of tensors that are named as weights, those of all pipeline stages."""
    duplicates = set(map(id, parts.parallel_model.duplicate_parameters))
    own = sum(
        weight.numel() * weight.itemsize
        for name, weight in tensors.items()
        if id(server.model[name]) not in duplicates
    )
    return sum_over_stages(parts, own)


def sum_over_stages(parts: Parts, own: int) -> int:
    """Return the sum over pipeline stages of a number that all ranks of a stage have alike."""
    if parts.degrees.pipeline == 1:
        return own
    total = torch.tensor(own, dtype=torch.int64, device=parts.device)
    dist.all_reduce(total)
    return int(total) * parts.degrees.pipeline // parts.degrees.world
