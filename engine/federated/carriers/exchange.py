"""What ranks that hold the same shards of different clients send to one another."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

BUCKET_BYTES = 2**20
"""small tensors are sent together; a larger one is sent alone, without a copy"""

LARGEST_VALUE = 2**24
"""bytes of a value that ranks tell one another, at most"""

PIECE = 2**20
"""number of values that are averaged at once, while the next piece is being sent"""


def average_in_order(
    peers: ProcessGroup, shards: Mapping[str, Tensor], shares: Mapping[int, float]
) -> dict[str, Tensor]:
    """Return the mean of the tensors of several ranks, in the order of the ranks, on every rank.

    It is an all-reduce that sums in a fixed order: each averaged rank receives one segment of the
    others' tensors, averages it and sends it to all. An all-reduce of gloo moves as many bytes, but
    the order of its sums, and so the last bit of the mean, differs by segment.

    Args:
        peers: the group; all of its ranks call this with tensors of the same shapes.
        shards: this rank's tensors by name; their values count only if it is averaged. Large ones
            on the CPU are overwritten with the mean.
        shares: for each averaged rank, ascending, by which share the mean of the ranks before moves
            towards its tensors; 1 for the first.
    """
    mean: dict[str, Tensor] = {}
    buckets = [(names, _join([shards[name] for name in names])) for names in _bucket(shards)]
    pending = deque[_OrderedMean]()
    pieces = (piece for _, flat in buckets for piece in torch.split(flat, PIECE))
    for piece in pieces:
        pending.append(_OrderedMean(peers, piece, shares))
        if len(pending) > 1:  # the next segments travel while one is averaged
            pending[-2].average()
        if len(pending) > 2:
            pending.popleft().wait()
    if pending:
        pending[-1].average()
    for each in pending:
        each.wait()
    for names, flat in buckets:
        parts = torch.split(flat, [shards[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            mean[name] = part.view(shards[name].shape).to(shards[name].device)
    return mean


class _OrderedMean:
    """The mean of a flat tensor over several ranks, on its way; the tensor becomes the mean.

    Args:
        peers: the group.
        flat: this rank's values, on the CPU.
        shares: those of `average_in_order`.
    """

    def __init__(self, peers: ProcessGroup, flat: Tensor, shares: Mapping[int, float]) -> None:
        self._peers, self._shares, self._own = peers, shares, peers.rank()
        segments = torch.tensor_split(flat, len(shares))
        pairs = zip(shares, segments, strict=True)
        self._segments = {rank: each for rank, each in pairs if each.numel()}
        self._parts: dict[int, Tensor] = {}
        self._works: list[dist.Work] = []
        if self._own not in shares:
            return
        for rank, segment in self._segments.items():
            self._send(segment, rank)
        if self._own in self._segments:
            mine = self._segments[self._own]
            self._parts = {rank: torch.empty_like(mine) for rank in shares if rank != self._own}
        for rank, part in self._parts.items():
            self._receive(part, rank)

    def average(self) -> None:
        """Average this rank's segment once the others' parts are there, and let it travel."""
        self.wait()
        mine = self._segments.get(self._own)
        if mine is not None:
            parts = {**self._parts, self._own: mine}
            first, *others = self._shares
            merged = parts[first]
            for rank in others:
                out = mine if rank == others[-1] else merged
                torch.lerp(merged, parts[rank], self._shares[rank], out=out)
        self._parts = {}
        for rank, segment in self._segments.items():
            if rank != self._own:
                self._receive(segment, rank)
        for rank in range(self._peers.size()):
            if mine is not None:
                self._send(mine, rank)

    def wait(self) -> None:
        """Wait for what travels."""
        for work in self._works:
            work.wait()
        self._works = []

    def _send(self, tensor: Tensor, rank: int) -> None:
        if rank != self._own:
            self._works.append(self._peers.send([tensor], rank, 0))

    def _receive(self, tensor: Tensor, rank: int) -> None:
        self._works.append(self._peers.recv([tensor], rank, 0))


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return the values of tensors one after another on the CPU; those of one in its own memory."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).cpu()


def gather_bytes(peers: ProcessGroup, data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return what every rank has sent to all.

    Args:
        peers: the group.
        data: this rank's bytes, uint8.
        sizes: number of bytes of each rank.
    """
    own, size = peers.rank(), peers.size()
    sent = [data.numel() * (rank != own) for rank in range(size)]
    received = [count * (rank != own) for rank, count in enumerate(sizes)]
    others = data.new_empty(sum(received))
    dist.all_to_all_single(others, data.repeat(size - 1), received, sent, group=peers)
    parts = list(torch.split(others, received))
    parts[own] = data
    return parts


def gather_values(peers: ProcessGroup, value: Any) -> list[Any]:
    """Return what every rank tells all, in the order of ranks: values as in JSON.

    JSON and not pickle, so that what arrives from another job never runs as code.

    Args:
        peers: the group.
        value: this rank's value.

    Raises:
        RuntimeError: a rank was lost.
        ValueError: what arrives is no JSON, or too long.
    """
    text = json.dumps(value).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    length = torch.tensor([len(text)]).view(torch.uint8)
    lengths = gather_bytes(peers, length, [length.numel()] * peers.size())
    sizes = [int(each.clone().view(torch.int64)) for each in lengths]
    if not all(0 < size <= LARGEST_VALUE for size in sizes):
        raise ValueError(f"ranks send {sizes} bytes, of which each may send {LARGEST_VALUE}")
    return [json.loads(bytes(each.tolist())) for each in gather_bytes(peers, data, sizes)]


def send_shards(
    peers: ProcessGroup, shards: Mapping[str, Tensor], sender: int, receivers: Sequence[int]
) -> None:
    """Give some ranks the tensors of one, in place.

    Args:
        peers: the group; ranks that neither send nor receive need not call this.
        shards: this rank's tensors, of the same names and shapes on all of these ranks.
        sender: the rank whose tensors are sent.
        receivers: the ranks whose tensors are overwritten.
    """
    for names in _bucket(shards):
        flat = _join([shards[name] for name in names])
        if peers.rank() == sender:
            for work in [peers.send([flat], rank, 0) for rank in receivers]:
                work.wait()
        elif peers.rank() in receivers:
            flat = torch.empty_like(flat)
            peers.recv([flat], sender, 0).wait()
            parts = torch.split(flat, [shards[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                shards[name].copy_(part.view(shards[name].shape))


def gather_shards(
    peers: ProcessGroup, shards: Mapping[str, Tensor], senders: Sequence[int]
) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of some ranks on every rank, by rank and name.

    Args:
        peers: the group; all of its ranks call this with tensors of the same shapes.
        shards: this rank's tensors; they travel only if it is among the senders.
        senders: ranks whose tensors are returned.
    """
    found: dict[int, dict[str, Tensor]] = {rank: {} for rank in senders}
    for names in _bucket(shards):
        flat = torch.cat([shards[name].reshape(-1) for name in names]).view(torch.uint8).cpu()
        sizes = [flat.numel() * (rank in senders) for rank in range(peers.size())]
        mine = flat if peers.rank() in senders else flat[:0]
        gathered = gather_bytes(peers, mine, sizes)
        lengths = [shards[name].numel() for name in names]
        for rank in senders:
            first = shards[names[0]]
            flat = gathered[rank].view(first.dtype).to(first.device)
            values = torch.split(flat, lengths)
            for name, value in zip(names, values, strict=True):
                found[rank][name] = value.view(shards[name].shape)
    return found


def split_bytes(data: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the payload of each tensor from the bytes of all."""
    # Copies, because codecs view bytes as wider numbers, which must be aligned.
    return {
        name: part.clone()
        for name, part in zip(sizes, torch.split(data, list(sizes.values())), strict=True)
    }


def _bucket(shards: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield names of consecutive tensors of one dtype that travel together."""
    names: list[str] = []
    total = 0
    for name, tensor in shards.items():
        size = tensor.numel() * tensor.itemsize
        if names and (total + size > BUCKET_BYTES or shards[names[0]].dtype != tensor.dtype):
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names
