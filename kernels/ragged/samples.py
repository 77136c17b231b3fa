"""Sums and selections by sample, of values of a flat row whose samples have unequal lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from .lengths import SampleLengths


def sum_by_sample(values: Tensor, lengths: SampleLengths) -> Tensor:
    """Return the sum over the positions of each sample, in fixed order, without atomics.

    Args:
        values: [T, ...]; numbers narrower than fp32 are summed in fp32, integers in int64.
        lengths: of the samples.

    Returns:
        [B, ...].
    """
    if not values.is_floating_point():
        # Sums of integers are exact in any order.
        zeros = values.new_zeros((len(lengths), *values.shape[1:]), dtype=torch.int64)
        return zeros.index_add_(0, lengths.numbers, values.long())
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    # `unsafe`: the check of the offsets would wait for the device.
    return torch.segment_reduce(
        wide, "sum", offsets=lengths.offsets.long(), axis=0, unsafe=True, initial=0
    )


def last_of_sample(values: Tensor, lengths: SampleLengths) -> Tensor:
    """Return the values [T, ...] at the last position of each sample, [B, ...]."""
    return values.index_select(0, lengths.offsets[1:] - 1)


def repeat_for_positions(values: Tensor, lengths: SampleLengths) -> Tensor:
    """Return the value of each position's sample, [T, ...] of [B, ...]."""
    return values.index_select(0, lengths.numbers)


def positions_in_samples(lengths: SampleLengths) -> Tensor:
    """Return each position's number within its sample, [T] int64."""
    place = torch.arange(lengths.total, device=lengths.device)
    return place - repeat_for_positions(lengths.offsets[:-1], lengths)


def pad_samples(values: Tensor, lengths: SampleLengths, fill: float = 0) -> Tensor:
    """Return the samples as rows padded at the right to the longest, [B, S, ...] of [T, ...]."""
    shape = (len(lengths), lengths.longest, *values.shape[1:])
    padded = values.new_full(shape, fill)
    return padded.index_put((lengths.numbers, positions_in_samples(lengths)), values)
