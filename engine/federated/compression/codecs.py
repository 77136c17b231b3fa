"""Codecs of pseudo-gradients: the bytes that travel, and the numbers that arrive.

Each takes a flat fp32 tensor, [N], and returns bytes, a uint8 tensor on the CPU. Decoding needs the
bytes and N alone, so that both ends compute the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

INDEX_BLOCK = 4096
"""values of a block of sparse codes, whose places take 12 bits"""
INDEX_BITS = 12


class Codec(ABC):
    """Encodes the pseudo-gradient of a client, and the merged one that goes back."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes that a client sends for a tensor, [N]."""

    @abstractmethod
    def decode(self, data: Tensor, size: int) -> Tensor:
        """Return the numbers that the server receives, [size], fp32 on the CPU."""

    @abstractmethod
    def count_bytes(self, size: int) -> int:
        """Return how many bytes `encode` makes of so many values."""

    def count_merged_bytes(self, size: int, clients: int) -> int:
        """Return the most bytes that `encode_merged` makes of the mean of so many clients."""
        return 2 * size

    def encode_merged(self, values: Tensor) -> Tensor:
        """Return the bytes that the server sends for a merged tensor, [N]: bf16."""
        return as_bytes(values.cpu().to(torch.bfloat16))

    def decode_merged(self, data: Tensor, size: int) -> Tensor:
        """Return the merged numbers, [size], with which server and clients step."""
        return data.view(torch.bfloat16).float()


class BF16Codec(Codec):
    """Rounds to bf16: 2 bytes a value."""

    def count_bytes(self, size: int) -> int:
        """Return how many bytes `encode` makes of so many values."""
        return 2 * size

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes that a client sends for a tensor, [N]."""
        return self.encode_merged(values)

    def decode(self, data: Tensor, size: int) -> Tensor:
        """Return the numbers that the server receives, [size]."""
        return self.decode_merged(data, size)


class IntegerCodec(Codec):
    """Rounds to integers with a scale for each block: the largest magnitude is the largest integer.

    Args:
        bits: 8 or 4; two values of 4 bits share a byte.
        block: values that share a scale of fp32; even.
    """

    def __init__(self, bits: int, block: int) -> None:
        self._bits = bits
        self._block = block
        self._largest = 2 ** (bits - 1) - 1

    def count_bytes(self, size: int) -> int:
        """Return how many bytes `encode` makes of so many values."""
        return 4 * -(-size // self._block) + -(-size * self._bits // 8)

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes that a client sends for a tensor, [N]: scales, then integers."""
        blocks = pad(values.cpu(), (0, -len(values) % self._block)).view(-1, self._block)
        scales = blocks.abs().amax(1) / self._largest
        # A block of zeros has the scale 0; NaN stays in the scale, for the server to see.
        divisors = torch.where(scales == 0, torch.ones(()), scales)[:, None]
        codes = (blocks / divisors).round().nan_to_num(0.0).to(torch.int8).view(-1)[: len(values)]
        return torch.cat([as_bytes(scales), self._pack(codes)])

    def _pack(self, codes: Tensor) -> Tensor:
        if self._bits == 8:
            return as_bytes(codes)
        pairs = pad(codes + 8, (0, len(codes) % 2)).to(torch.uint8).view(-1, 2)
        return pairs[:, 0] << 4 | pairs[:, 1]

    def decode(self, data: Tensor, size: int) -> Tensor:
        """Return the numbers that the server receives, [size]."""
        count = -(-size // self._block)
        scales, codes = data[: 4 * count].view(torch.float32), data[4 * count :]
        if self._bits == 8:
            integers = codes.view(torch.int8).float()
        else:
            integers = torch.stack([codes >> 4, codes & 15], 1).view(-1).float() - 8
        return integers[:size] * scales.repeat_interleave(self._block)[:size]


class TopKCodec(Codec):
    """Keeps the largest values of each block of 4,096, each as a sign and one of two magnitudes.

    A value takes 12 bits for its place and 2 for itself; the two magnitudes of a tensor are the
    means of the magnitudes above and below their mean. Source of 64 values a block in 2 bits:
    SparseLoCo, arXiv:2508.15706.

    Args:
        keep: values of a block that travel.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep

    def _counts(self, size: int) -> list[int]:
        """Return how many values of each block travel; of a part of a block, its share."""
        whole, rest = divmod(size, INDEX_BLOCK)
        part = [-(-self._keep * rest // INDEX_BLOCK)] if rest else []
        return [self._keep] * whole + part

    def count_bytes(self, size: int) -> int:
        """Return how many bytes `encode` makes of so many values."""
        total = sum(self._counts(size))
        return 8 + -(-total * INDEX_BITS // 8) + -(-total * 2 // 8)

    def count_merged_bytes(self, size: int, clients: int) -> int:
        """Return the most bytes that `encode_merged` makes of the mean of so many clients."""
        counts = [min(INDEX_BLOCK, clients * count) for count in self._counts(size)]
        bits = sum(min(INDEX_BITS * count, INDEX_BLOCK) for count in counts)
        return 2 * len(counts) + -(-bits // 8) + 2 * sum(counts)

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes that a client sends for a tensor, [N]: magnitudes, places, codes."""
        chosen, counts = [], self._counts(len(values))
        for block, count in zip(torch.split(values, INDEX_BLOCK), counts, strict=True):
            # NaN counts as the largest, so that the server sees it.
            magnitudes = block.abs().nan_to_num(torch.inf, torch.inf)
            chosen.append(magnitudes.topk(count).indices.sort().values)
        places = torch.cat(chosen)
        starts = torch.arange(len(chosen), device=places.device).repeat_interleave(
            torch.tensor([len(each) for each in chosen], device=places.device)
        )
        kept = values[places + starts * INDEX_BLOCK].cpu()
        sizes = kept.abs()
        is_large = sizes > sizes.mean()
        low, high = (sizes[mask].mean() if mask.any() else sizes.mean()
                     for mask in (~is_large, is_large))  # fmt: skip
        codes = (kept < 0).to(torch.uint8) * 2 + is_large.to(torch.uint8)
        head = as_bytes(torch.stack([low, high]).float())
        return torch.cat([head, pack_bits(places, INDEX_BITS), pack_bits(codes, 2)])

    def decode(self, data: Tensor, size: int) -> Tensor:
        """Return the numbers that the server receives, [size]; those that did not travel are 0."""
        counts = self._counts(size)
        total = sum(counts)
        border = 8 + -(-total * INDEX_BITS // 8)
        starts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        places = unpack_bits(data[8:border], INDEX_BITS, total) + starts * INDEX_BLOCK
        codes = unpack_bits(data[border:], 2, total)
        magnitudes = data[:8].view(torch.float32)[codes & 1]
        values = torch.zeros(size)
        values[places] = torch.where(codes > 1, -magnitudes, magnitudes)
        return values

    def encode_merged(self, values: Tensor) -> Tensor:
        """Return the bytes that the server sends for a merged tensor, [N].

        For each block: how many values are not 0, and their places, as numbers of 12 bits or as a
        mask of 4,096 bits, whichever is shorter. Then all these values in bf16.
        """
        rounded = values.cpu().to(torch.bfloat16)
        flags = pad(rounded != 0, (0, -len(values) % INDEX_BLOCK)).view(-1, INDEX_BLOCK)
        counts = flags.sum(1, dtype=torch.int16)
        has_mask = _has_mask(counts)
        return torch.cat(
            [
                as_bytes(counts),
                pack_bits(flags[~has_mask].nonzero()[:, 1], INDEX_BITS),
                pack_bits(flags[has_mask].view(-1), 1),
                as_bytes(rounded[flags.view(-1)[: len(values)]]),
            ]
        )

    def decode_merged(self, data: Tensor, size: int) -> Tensor:
        """Return the merged numbers, [size], with which server and clients step."""
        blocks = -(-size // INDEX_BLOCK)
        counts = data[: 2 * blocks].clone().view(torch.int16).long()
        has_mask = _has_mask(counts)
        listed, masked = int(counts[~has_mask].sum()), int(has_mask.sum()) * INDEX_BLOCK
        _, places, masks, kept = torch.split(
            data, [2 * blocks, -(-listed * INDEX_BITS // 8), masked // 8, 2 * int(counts.sum())]
        )
        flags = torch.zeros(blocks, INDEX_BLOCK, dtype=torch.bool)
        rows = (~has_mask).nonzero().view(-1).repeat_interleave(counts[~has_mask])
        flags[rows, unpack_bits(places, INDEX_BITS, listed)] = True
        flags[has_mask] = unpack_bits(masks, 1, masked).bool().view(-1, INDEX_BLOCK)
        values = kept.clone().view(torch.bfloat16).float()
        return torch.zeros(size).masked_scatter_(flags.view(-1)[:size], values)


def _has_mask(counts: Tensor) -> Tensor:
    """Return for each block whether a mask takes fewer bits than a list of places, [blocks]."""
    return counts.long() * INDEX_BITS > INDEX_BLOCK


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, [bytes], if possible in the same memory."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """Return numbers below 2^bits, the most significant bit first, filled up to whole bytes."""
    columns = numbers.cpu().numpy().astype(np.uint16)[:, None] >> np.arange(bits - 1, -1, -1)
    return torch.from_numpy(np.packbits((columns & 1).astype(np.uint8)))


def unpack_bits(data: Tensor, bits: int, count: int) -> Tensor:
    """Return the numbers that `pack_bits` was given, int64, [count]."""
    columns = np.unpackbits(data.numpy(), count=count * bits).reshape(count, bits)
    return torch.from_numpy(columns.astype(np.int64) @ (1 << np.arange(bits - 1, -1, -1)))
