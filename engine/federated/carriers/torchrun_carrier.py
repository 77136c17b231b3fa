"""The carrier "torchrun": each client is a part of the ranks of one job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...core import faults
from ...core.local import local
from ...launch.group import RankPeers
from ...launch.signals import StopFlag, StopRequested
from ...train.average import reshard
from ...train.parts import Position
from ..client import LocalResult
from ..merge.geometry import Gradient
from ..server.arrival import Arrival
from .exchange import (
    average_in_order,
    gather_bytes,
    gather_shards,
    split_bytes,
)
from .local_carrier import ClientUpdate, LocalCarrier


@dataclass(frozen=True)
class _Report:
    """What a client tells the others of its round, before its update travels."""

    result: LocalResult
    weight: float
    norm: float
    rejected: str
    sizes: dict[str, int]
    """bytes of what is compressed, by weight"""

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Return a report that has travelled as JSON."""
        return cls(**{**values, "result": LocalResult(**values["result"])})


@dataclass(frozen=True)
class OwnUpdate:
    """What this rank's client has to send after its round.

    Attributes:
        report: what all others are told.
        gradient: its pseudo-gradient, this rank's shards; an exchange may overwrite it.
        payloads: what is compressed, by weight.
    """

    report: _Report
    gradient: Gradient
    payloads: dict[str, Tensor]


class TorchrunCarrier(LocalCarrier):
    """Trains one client in the ranks of this process's part of a job, beside the other clients.

    Every client has the server's state, and steps itself. Ranks that have the same place in each
    client hold the same shards, and exchange them, so that no rank holds the whole of a sharded
    model. Every number is that of `LocalCarrier`, bit for bit.
    """

    def wants_stop(self, stop: StopFlag) -> bool:
        """Return whether a signal asks a rank of this client to stop: clients do not wait here."""
        group = dist.group.WORLD if dist.is_initialized() else None
        return RankPeers(group).any(stop.requested) if group else stop.requested

    @property
    def peers(self) -> ProcessGroup:
        """The ranks that hold the same shards as this one, one of each client of a round."""
        assert self._ranks.peers is not None, "the ranks of a job are divided"
        return self._ranks.peers

    @property
    def members(self) -> Sequence[int]:
        """The numbers of the clients of `peers`, ascending."""
        return range(self._table.num_clients)

    def run_round(
        self, chosen: Sequence[int], position: Position, check: Callable[[], None]
    ) -> Iterator[ClientUpdate]:
        """Train this rank's client, and exchange the updates of all clients.

        Args: those of `LocalCarrier.run_round`.

        Raises:
            StopRequested: a client was asked to stop, before the end of its round.
        """
        number = self._ranks.number
        own, is_stopped = None, False
        if number in chosen:
            try:
                own = self._train_own(position, check)
            except StopRequested:
                is_stopped = True
        if any(self._ranks.gather(is_stopped)):
            raise StopRequested
        faults.point("federation.exchange", number or 0, position.step)
        told = self._ranks.gather(asdict(own.report) if own else None)
        yield from self._share(own, told, position)

    def _train_own(self, position: Position, check: Callable[[], None]) -> OwnUpdate:
        """Train this rank's client; the model has its weights then."""
        assert self._ranks.number is not None, "the ranks of a job are divided"
        client, payloads = self._clients[self._ranks.number], dict[str, Tensor]()
        try:
            result = self.train_client(client, position, check)
            arrival, gradient = self._server.collect(client, self._weigh(result), payloads)
        finally:
            self._held.end(client)
        sizes = {name: data.numel() for name, data in payloads.items()}
        report = _Report(result, arrival.weight, arrival.norm, arrival.rejected, sizes)
        return OwnUpdate(report, gradient, payloads)

    def _share(
        self,
        own: OwnUpdate | None,
        told: Sequence[dict[str, Any] | None],
        position: Position,
    ) -> list[ClientUpdate]:
        """Exchange the updates of a round, and let this rank's server take them.

        Args:
            own: the update of this rank's client; None: it has not trained.
            told: what the clients of `members` say of theirs, as JSON.
            position: the position of the run at the start of the round.
        """
        pairs = zip(self.members, told, strict=True)
        reports = {number: _Report.read(each) for number, each in pairs if each}
        arrivals = {
            number: Arrival(self._clients[number], each.weight, each.norm, 0, each.rejected)
            for number, each in reports.items()
        }
        traffic = self._exchange(arrivals, own, reports)
        updates = []
        for number, arrival in arrivals.items():
            self._clients[number].last_round = position.step // self._parts.stride + 1
            arrival.bytes_sent, received = traffic[number]
            result = reports[number].result
            updates.append(ClientUpdate(arrival, result, arrival.bytes_sent, received))
        self._policy.finish_round(position.step + self._parts.stride)
        return updates

    def confirm(self) -> None:
        """Begin to change the server's state, because this rank has received all that it needs."""

    @torch.no_grad()
    def _exchange(
        self, arrivals: dict[int, Arrival], own: OwnUpdate | None, reports: Mapping[int, _Report]
    ) -> dict[int, tuple[int, int]]:
        """Let every client's server take the updates.

        Returns:
            the bytes that each client sends to others and receives from them, by client.
        """
        server, count = self._server, len(self.members)
        senders = [number for number, each in arrivals.items() if not each.rejected]
        if len(arrivals) == 1 and not server.holds_updates and not server.compressor.is_lossy:
            return self._share_weights(arrivals)
        if server.holds_updates or server.compressor.is_lossy:
            sizes = self._gather_updates(arrivals, own, reports, senders)
            total = sum(sizes.values())
            return {
                number: (sizes.get(number, 0) * (count - 1), total - sizes.get(number, 0))
                for number in arrivals
            }
        shares, weights = {}, 0.0
        for number in senders:
            weights += arrivals[number].weight
            share = arrivals[number].weight / weights if weights else 1.0
            shares[self.members.index(number)] = share
        moved, averaged = self._count_moved(), dict[str, Tensor]()
        if senders:
            gradient = own.gradient if own else self._empty_gradient()
            averaged = average_in_order(self.peers, gradient, shares)
        self.confirm()
        server.admit_mean(arrivals.values(), averaged)
        # A sender owns a segment: it receives the others' parts of it, and sends its mean to all.
        share = moved // max(len(senders), 1)
        sent = share * (len(senders) - 1) + share * (count - 1)
        return {
            number: (sent, 2 * share * (len(senders) - 1)) if number in senders else (0, moved)
            for number in arrivals
        }

    def _gather_updates(
        self,
        arrivals: dict[int, Arrival],
        own: OwnUpdate | None,
        reports: Mapping[int, _Report],
        senders: Sequence[int],
    ) -> dict[int, int]:
        """Send every update to every client; return the bytes of each.

        What is compressed was encoded whole, alike on all ranks of a client: its first rank sends
        it, and the others of the client that receives it get it from that client's first rank.
        """
        server, peers, members = self._server, self.peers, self.members
        whole = own.gradient if own else self._empty_gradient()
        encoded = next((each.sizes for each in reports.values()), {})
        plain = {name: value for name, value in whole.items() if name not in encoded}
        moved = self._sum_ranks(sum(value.numel() * value.itemsize for value in plain.values()))
        shards = gather_shards(peers, plain, [members.index(number) for number in senders])
        sizes = {}
        totals = [
            sum(reports[number].sizes.values()) if number in senders else 0 for number in members
        ]
        data = [torch.empty(size, dtype=torch.uint8) for size in totals]
        if encoded and self._parts.world.rank == 0:
            mine = data[peers.rank()]
            if own and mine.numel():
                mine = torch.cat([own.payloads[name].cpu() for name in encoded])
            data = gather_bytes(peers, mine, totals)
        self.confirm()
        for number, arrival in arrivals.items():
            update, rank = dict[str, Tensor](), members.index(number)
            if number in senders:
                update = shards[rank]
                update |= self._decode(data[rank], reports[number])
                sizes[number] = moved + totals[rank]
            server.admit(arrival, {name: update[name] for name in whole if name in update})
        return sizes

    def _decode(self, data: Tensor, told: _Report) -> dict[str, Tensor]:
        if not told.sizes:
            return {}
        data = data.to(self._parts.device)
        if dist.is_initialized():
            dist.broadcast(data, 0)
        return self._server.compressor.receive(split_bytes(data, told.sizes))

    def _share_weights(self, arrivals: dict[int, Arrival]) -> dict[int, tuple[int, int]]:
        """Give all clients the weights of the only one that has trained; they are the mean."""
        ((number, arrival),) = arrivals.items()
        server, rank = self._server, self.members.index(number)
        reshard(self._parts.model)
        names = [name for name in server.weights if name in server.active]
        weights = {name: local(server.model[name]) for name in names}
        found = weights
        if not arrival.rejected:
            found = gather_shards(self.peers, weights, [rank])[rank]
        self.confirm()
        for name, weight in weights.items():
            weight.copy_(found[name])
        starts = {name: local(server.weights[name]) for name in names}
        server.admit(arrival, {name: starts[name] - weight for name, weight in weights.items()})
        sent = self._count_moved() * (len(self.members) - 1) * (not arrival.rejected)
        return {number: (sent, 0)}

    def _empty_gradient(self) -> Gradient:
        """Return tensors of the shapes of a pseudo-gradient, for a client without one."""
        weights = self._server.weights.items()
        return {
            name: torch.empty_like(local(each))
            for name, each in weights
            if name in self._server.active
        }

    def _count_moved(self) -> int:
        """Return the bytes of the shards that all ranks of a client exchange."""
        weights = self._server.weights.items()
        shards = [local(each) for name, each in weights if name in self._server.active]
        return self._sum_ranks(sum(each.numel() * each.itemsize for each in shards))

    def _sum_ranks(self, own: int) -> int:
        if not dist.is_initialized():
            return own
        total = torch.tensor(own, dtype=torch.int64, device=self._parts.device)
        dist.all_reduce(total)
        return int(total)
