"""The carrier "local": clients train one after another where the server is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.local import local
from ...launch.signals import StopFlag
from ...train.average import reshard
from ...train.parts import Parts, Position
from ..client import Client, LocalResult, train_locally
from ..held_buffers import HeldBuffers
from ..optimizer_policy import OptimizerPolicy
from ..server.server import Arrival, Server
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
        clients: all clients, in the order of their numbers.
        server: the server.
        policy: what becomes of the clients' optimizer state.
        held: the buffers that do not travel.
        ranks: the clients whose state this rank keeps.
    """

    def __init__(
        self,
        table: Federation,
        parts: Parts,
        clients: Sequence[Client],
        server: Server,
        policy: OptimizerPolicy,
        held: HeldBuffers,
        ranks: ClientRanks,
    ) -> None:
        self._ranks = ranks
        self._table = table
        self._parts = parts
        self._clients = clients
        self._server = server
        self._policy = policy
        self._held = held
        for client in clients:
            if ranks.owns(client.number):
                held.begin(client)
                held.end(client)
        self._stale = table.fragments if table.fragments.is_enabled else None
        self._bytes = count_bytes(parts, server, server.weights)
        states = {name: tensor for name, each in server.states.items() for tensor in each.values()}
        self._state_bytes = count_bytes(parts, server, states) * len(table.server.states)

    def run_round(
        self, chosen: Sequence[int], position: Position, check: Callable[[], None]
    ) -> Iterator[ClientUpdate]:
        """Train the clients of a round and add their updates to the server's mean, in their order.

        Args:
            chosen: numbers of the clients, ascending.
            position: the position of the run at the start of the round.
            check: called before each optimizer step; what it raises ends the round.
        """
        for number in chosen:
            client = self._clients[number]
            received = self._count_received(client, position)
            result = self._train(client, position, check)
            weight = self._weigh(result)
            arrival = self._server.receive(client, weight)
            client.last_round = position.step // self._parts.stride + 1
            self._held.end(client)
            states = 0 if arrival.rejected else self._policy.end(weight)
            sent = self._sum_bytes(arrival.bytes_sent + states)
            yield ClientUpdate(arrival, result, sent, received)
        self._policy.finish_round(position.step + self._parts.stride)

    def wants_stop(self, stop: StopFlag) -> bool:
        """Return whether a signal asks to end a round before its end, on any rank of a client."""
        return stop.agree()

    def _train(self, client: Client, position: Position, check: Callable[[], None]) -> LocalResult:
        """Run a client's steps of a round; the model has its weights then."""
        self._server.broadcast()
        self._policy.begin(client)
        self._held.begin(client)
        before_step = self._restore_weights(client, check)
        result = train_locally(self._parts, client, position, before_step)
        self._keep_weights(client)
        return result

    @torch.no_grad()
    def _restore_weights(self, client: Client, check: Callable[[], None]) -> Callable[[int], None]:
        """Give the model a client's own weights, where it keeps them between rounds.

        Returns:
            what is called before each step, with the number of finished steps of the round: it lets
            the fragment that the last round has merged arrive.
        """
        fragments, server = self._stale, self._server
        if fragments is None or not client.weights:
            return lambda done: check()
        for name, weight in client.weights.items():
            local(server.model[name]).copy_(local(weight))
        arriving = server.fragment_of(client.last_round)

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
            for name in self._server.states:
                weight = self._server.model[name]
                kept = client.weights.setdefault(name, torch.empty_like(weight.detach()))
                local(kept).copy_(local(weight))

    def _weigh(self, result: LocalResult) -> float:
        if self._table.weighting == "uniform":
            return 1.0
        samples = self._parts.loader.turns.count_samples(self._parts.stride)
        return float(result.count if self._table.weighting == "tokens" else samples)

    def _count_received(self, client: Client, position: Position) -> int:
        """Return the bytes that a client receives at the start of a round.

        With compression, a client that trained in the round before steps by itself from the merged
        pseudo-gradient; any other one receives weights and outer states. With fragments, a client
        receives the one that was merged.
        """
        shared, server = self._sum_bytes(self._policy.shared_bytes), self._server
        finished = position.step // self._parts.stride
        follows = finished and client.last_round == finished
        if follows and (server.compressor.is_lossy or self._stale):
            return self._sum_bytes(server.merged_bytes) + shared
        if not server.compressor.is_lossy:
            return self._bytes + shared
        return self._bytes + shared + (self._state_bytes if finished else 0)

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
