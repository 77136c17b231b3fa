"""What ranks that hold the same shards of different clients send to one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

BUCKET_BYTES = 32 * 2**20
"""small tensors travel together; a larger one travels alone"""


def average_in_order(
    peers: ProcessGroup, shards: Mapping[str, Tensor], shares: Mapping[int, float]
) -> dict[str, Tensor]:
    """Return the mean of the tensors of several ranks, in the order of the ranks, on every rank.

    It is an all-reduce that sums in a fixed order: each averaged rank receives one segment of the
    others' tensors, averages it and sends it to all. An all-reduce of gloo moves as many bytes, but
    the order of its sums, and so the last bit of the mean, differs by segment.

    Args:
        peers: the group; all of its ranks call this with tensors of the same shapes.
        shards: this rank's tensors by name; their values count only if it is averaged.
        shares: for each averaged rank, ascending, by which share the mean of the ranks before moves
            towards its tensors; 1 for the first.
    """
    mean: dict[str, Tensor] = {}
    for names in _bucket(shards):
        flat = torch.cat([shards[name].reshape(-1) for name in names])
        merged = _average_flat(peers, flat.cpu(), shares).to(flat.device)
        parts = torch.split(merged, [shards[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            mean[name] = part.view(shards[name].shape)
    return mean


def _average_flat(peers: ProcessGroup, flat: Tensor, shares: Mapping[int, float]) -> Tensor:
    own, size, length = peers.rank(), peers.size(), flat.numel()
    bounds = [length * index // len(shares) for index in range(len(shares) + 1)]
    segments = dict(zip(shares, (end - start for start, end in pairwise(bounds)), strict=True))
    mine, is_averaged = segments.get(own, 0), own in shares
    # A rank's own part stays where it is: only what others need travels.
    sent = [segments.get(rank, 0) * (is_averaged and rank != own) for rank in range(size)]
    received = [mine * (rank in shares and rank != own) for rank in range(size)]
    start = bounds[list(shares).index(own)] if is_averaged else 0
    outgoing = flat
    if is_averaged:
        outgoing = torch.cat([flat[:start], flat[start + mine :]])
    incoming = flat.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing[: sum(sent)], received, sent, group=peers)
    merged, taken = flat.new_empty(mine), 0
    for index, (rank, share) in enumerate(shares.items() if is_averaged else ()):
        value = flat[start : start + mine]
        if rank != own:
            value = incoming[taken : taken + mine]
            taken += mine
        if index:
            merged.lerp_(value, share)
        else:
            merged.copy_(value)
    return _share_segments(peers, merged, segments, length)


def _share_segments(
    peers: ProcessGroup, merged: Tensor, segments: Mapping[int, int], length: int
) -> Tensor:
    """Return the segments of all ranks, one after another."""
    own, size = peers.rank(), peers.size()
    mine = segments.get(own, 0)
    sent = [mine * (rank != own) for rank in range(size)]
    received = [segments.get(rank, 0) * (rank != own) for rank in range(size)]
    others = merged.new_empty(length - mine)
    dist.all_to_all_single(others, merged.repeat(size - 1), received, sent, group=peers)
    if not mine:
        return others
    before = sum(received[:own])
    return torch.cat([others[:before], merged, others[before:]])


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
