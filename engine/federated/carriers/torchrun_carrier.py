"""The carrier "torchrun": each client is a part of the ranks of one job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...core import faults
from ...core.local import local
from ...launch.group import RankPeers
from ...launch.signals import StopFlag, StopRequested
from ...train.average import reshard
from ...train.parts import Position
from ..client import LocalResult
from ..merge.geometry import Gradient
from ..server.arrival import Arrival
from .exchange import average_in_order, gather_bytes, gather_shards, split_bytes
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

    def run_round(
        self, chosen: Sequence[int], position: Position, check: Callable[[], None]
    ) -> Iterator[ClientUpdate]:
        """Train this rank's client, and exchange the updates of all clients.

        Args: those of `LocalCarrier.run_round`.

        Raises:
            StopRequested: a client was asked to stop, before the end of its round.
        """
        server, number = self._server, self._ranks.number
        assert number is not None, "the ranks of a job are divided"
        client, payloads = self._clients[number], dict[str, Tensor]()
        report: _Report | str | None = None
        gradient: Gradient = {}
        if number in chosen:
            try:
                result = self.train_client(client, position, check)
            except StopRequested:
                report = "stopped"
            else:
                arrival, gradient = server.collect(client, self._weigh(result), payloads)
                sizes = {name: data.numel() for name, data in payloads.items()}
                weight, norm = arrival.weight, arrival.norm
                report = _Report(result, weight, norm, arrival.rejected, sizes)
            self._held.end(client)
        reports = self._ranks.gather(report)
        if any(isinstance(each, str) for each in reports):
            raise StopRequested
        faults.point("federation.exchange", number, position.step)
        arrivals = {
            index: Arrival(self._clients[index], told.weight, told.norm, 0, told.rejected)
            for index, told in enumerate(reports)
            if isinstance(told, _Report)
        }
        traffic = self._exchange(arrivals, gradient, payloads, reports)
        for index, arrival in arrivals.items():
            self._clients[index].last_round = position.step // self._parts.stride + 1
            arrival.bytes_sent, received = traffic[index]
            yield ClientUpdate(arrival, reports[index].result, arrival.bytes_sent, received)
        self._policy.finish_round(position.step + self._parts.stride)

    @torch.no_grad()
    def _exchange(
        self,
        arrivals: dict[int, Arrival],
        gradient: Gradient,
        payloads: dict[str, Tensor],
        reports: Sequence[_Report | None],
    ) -> dict[int, tuple[int, int]]:
        """Let every client's server take the updates.

        Returns:
            the bytes that each client sends to others and receives from them, by client.
        """
        server, count = self._server, self._table.num_clients
        senders = [index for index, each in arrivals.items() if not each.rejected]
        if len(arrivals) == 1 and not server.holds_updates and not server.compressor.is_lossy:
            return self._share_weights(arrivals)
        if server.holds_updates or server.compressor.is_lossy:
            sizes = self._gather_updates(arrivals, gradient, payloads, reports, senders)
            total = sum(sizes.values())
            return {
                index: (sizes.get(index, 0) * (count - 1), total - sizes.get(index, 0))
                for index in arrivals
            }
        shares, weights = {}, 0.0
        for index in senders:
            weights += arrivals[index].weight
            shares[index] = arrivals[index].weight / weights if weights else 1.0
        peers, averaged = self._ranks.peers, dict[str, Tensor]()
        assert peers is not None
        moved = self._count_moved()
        if senders:
            averaged = average_in_order(peers, gradient or self._empty_gradient(), shares)
        server.admit_mean(arrivals.values(), averaged)
        # A sender owns a segment: it receives the others' parts of it, and sends its mean to all.
        share = moved // max(len(senders), 1)
        sent = share * (len(senders) - 1) + share * (count - 1)
        return {
            index: (sent, 2 * share * (len(senders) - 1)) if index in senders else (0, moved)
            for index in arrivals
        }

    def _gather_updates(
        self,
        arrivals: dict[int, Arrival],
        gradient: Gradient,
        payloads: dict[str, Tensor],
        reports: Sequence[_Report | None],
        senders: Sequence[int],
    ) -> dict[int, int]:
        """Send every update to every client; return the bytes of each.

        What is compressed was encoded whole, alike on all ranks of a client: its first rank sends
        it, and the others of the client that receives it get it from that client's first rank.
        """
        server, peers = self._server, self._ranks.peers
        assert peers is not None
        whole = gradient or self._empty_gradient()
        encoded = next((told.sizes for told in reports if told), {})
        plain = {name: value for name, value in whole.items() if name not in encoded}
        shards = gather_shards(peers, plain, senders)
        moved = self._sum_ranks(sum(value.numel() * value.itemsize for value in plain.values()))
        sizes = {}
        totals = [sum(told.sizes.values()) if told else 0 for told in reports]
        totals = [size * (index in senders) for index, size in enumerate(totals)]
        data = [torch.empty(size, dtype=torch.uint8) for size in totals]
        if encoded and self._parts.world.rank == 0:
            mine = data[peers.rank()]
            if mine.numel():
                mine = torch.cat([payloads[name].cpu() for name in encoded])
            data = gather_bytes(peers, mine, totals)
        for index, arrival in arrivals.items():
            update = dict[str, Tensor]()
            if index in senders:
                update = shards[index]
                update |= self._decode(data[index], reports[index])
                sizes[index] = moved + totals[index]
            server.admit(arrival, {name: update[name] for name in whole if name in update})
        return sizes

    def _decode(self, data: Tensor, told: _Report | None) -> dict[str, Tensor]:
        if told is None or not told.sizes:
            return {}
        data = data.to(self._parts.device)
        if dist.is_initialized():
            dist.broadcast(data, 0)
        return self._server.compressor.receive(split_bytes(data, told.sizes))

    def _share_weights(self, arrivals: dict[int, Arrival]) -> dict[int, tuple[int, int]]:
        """Give all clients the weights of the only one that has trained; they are the mean."""
        ((index, arrival),) = arrivals.items()
        server, peers = self._server, self._ranks.peers
        assert peers is not None
        reshard(self._parts.model)
        names = [name for name in server.weights if name in server.active]
        weights = {name: local(server.model[name]) for name in names}
        found = weights
        if not arrival.rejected:
            found = gather_shards(peers, weights, [index])[index]
        for name, weight in weights.items():
            weight.copy_(found[name])
        starts = {name: local(server.weights[name]) for name in names}
        server.admit(arrival, {name: starts[name] - weight for name, weight in weights.items()})
        sent = self._count_moved() * (self._table.num_clients - 1) * (not arrival.rejected)
        return {index: (sent, 0)}

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
