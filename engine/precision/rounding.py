"""Weights in bf16: an optimizer updates fp32 copies of a few at a time, which are rounded back.

Rounding to the nearest loses updates below half of bf16's spacing. Stochastic rounding goes up or
down with probabilities that make the mean exact (Zamirai et al. 2020, arXiv:2010.06192, section 4):
random bits are added below the mantissa that stays, and the rest is cut off.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.box import Box, contiguous_box, local_box
from ..core.local import is_split, local
from ..optim.parameters import undecorated_step

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Place = tuple[str, Box | None]
"""a parameter's name, and where this rank's part lies in the whole; None: it is no box"""

BUCKET = 2**25
"""elements of which fp32 copies of weights and gradients exist at a time, or one weight of more"""
CHUNK = 2**22
"""elements that are rounded at a time"""
COUNT = "roundings"
"""key of an optimizer's state for the number of times that a weight was rounded"""


def divide_groups(groups: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield parameter groups of at most `BUCKET` local elements, or of one larger parameter."""
    for group in groups:
        bucket, held = list[nn.Parameter](), 0
        for weight in group["params"]:
            size = local(weight).numel()
            if bucket and held + size > BUCKET:
                yield {**group, "params": bucket}
                bucket, held = [], 0
            bucket.append(weight)
            held += size
        yield {**group, "params": bucket}


def make_rounded_step(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, nn.Parameter]],
    seed: int | None,
    *,
    is_simulated: bool = False,
) -> Callable[[], None]:
    """Return a function that steps the optimizer on fp32 copies and rounds the results to bf16.

    The optimizer's state is in fp32. Which way an element is rounded depends on the seed, on the
    parameter's name, on how often it was rounded, and on the element's place in the whole
    parameter: replicas stay equal, and no plan changes it.

    Args:
        optimizer: its groups hold a bucket of parameters each; see `divide_groups`.
        parameters: the model's parameters by name.
        seed: the seed of the random bits; None rounds to the nearest.
        is_simulated: tensors have no content.
    """
    step = undecorated_step(optimizer)
    places: dict[nn.Parameter, Place] = {}
    for name, weight in parameters:
        # Where a shard begins is a value of a tensor, which a simulation has not.
        shape = tuple(local(weight).shape)
        box = Box((0,) * len(shape), shape) if is_simulated else _find_box(weight)
        places[weight] = name, box

    @torch.no_grad()
    def update() -> None:
        groups = optimizer.param_groups
        try:
            for group in groups:
                optimizer.param_groups = [group]
                _update_bucket(optimizer, group, step, places, seed)
        finally:
            optimizer.param_groups = groups

    return update


def _update_bucket(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    step: Callable[[], None],
    places: Mapping[nn.Parameter, Place],
    seed: int | None,
) -> None:
    weights, state = group["params"], optimizer.state
    trained = [weight for weight in weights if weight.grad is not None]
    group["params"] = copies = [weight.detach().to(torch.float32) for weight in trained]
    for weight, copy in zip(trained, copies, strict=True):
        copy.grad = weight.grad.to(torch.float32)
        if weight in state:
            state[copy] = state.pop(weight)
    try:
        step()
    finally:
        group["params"] = weights
        for weight, copy in zip(trained, copies, strict=True):
            if copy in state:
                state[weight] = state.pop(copy)
    for weight, copy in zip(trained, copies, strict=True):
        if seed is None:
            local(weight).copy_(local(copy))
        else:
            # After the optimizer's first step: it would take a state with a key for its own.
            count = state[weight].get(COUNT, 0)
            state[weight][COUNT] = count + 1
            name, box = places[weight]
            round_stochastically(weight, local(copy), f"{seed}:{name}:{count}", box)


def _find_box(weight: Tensor) -> Box | None:
    return contiguous_box(cast("DTensor", weight)) if is_split(weight) else local_box(weight)


def round_stochastically(weight: Tensor, values: Tensor, key: str, box: Box | None) -> None:
    """Round fp32 values to bf16, up or down at random, into this rank's part of a weight.

    Args:
        weight: the weight in bf16, whole or a DTensor.
        values: the values of this rank's part.
        key: what the random bits depend on, beside the place of each element in the whole weight.
        box: where this rank's part lies in the whole weight; None: it is no box.
    """
    salts = _salts(key, weight.ndim)
    target = local(weight)
    if box is None:
        # Strided shards are no box: draw for the whole weight, and cut, without communication.
        from torch.distributed.tensor import distribute_tensor

        shape = tuple(weight.shape)
        bits = random_bits(salts, Box((0,) * len(shape), shape), values.device)
        placed = cast("DTensor", weight)
        cut = distribute_tensor(bits, placed.device_mesh, placed.placements, src_data_rank=None)
        _round_into(target, values, cut.to_local())
        return
    if not weight.ndim:
        _round_into(target, values, random_bits(salts, box, values.device))
        return
    rows = max(1, CHUNK // max(1, prod(box.sizes[1:])))
    for first, last in box.chunks(rows):
        part = Box((first, *box.start[1:]), (last - first, *box.sizes[1:]))
        at = slice(first - box.start[0], last - box.start[0])
        _round_into(target[at], values[at], random_bits(salts, part, values.device))


def _salts(key: str, ndim: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(key.encode(), digest_size=4 * (ndim + 1)).digest()
    return struct.unpack(f"<{ndim + 1}i", digest)


def random_bits(salts: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """Return 16 random bits for each element of a box, in int32.

    They are a hash of the element's index along each dimension: not torch's generators, which know
    no place in a tensor, and differ between CPU and GPU.

    Args:
        salts: a random number for each dimension, and one more.
        box: a part of a tensor.
        device: the device of the result.
    """
    words = torch.full((1,) * len(box.sizes), salts[-1], dtype=torch.int32, device=device)
    for dim, (start, size, salt) in enumerate(zip(*box, salts[:-1], strict=True)):
        index = torch.arange(start, start + size, dtype=torch.int32, device=device)
        words = words ^ _mix(index ^ salt).view(-1, *(1,) * (len(box.sizes) - dim - 1))
    return _mix(words).bitwise_and_(0xFFFF)


def _mix(x: Tensor) -> Tensor:
    """Hash int32 in place, one to one; source: lowbias32 of C. Wellons, "Prospecting for Hash
    Functions" (nullprogram.com, 2018).
    """
    # A shift of int32 copies the sign: masks make it that of an unsigned number.
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _round_into(target: Tensor, values: Tensor, bits: Tensor) -> None:
    rounded = bits.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    # A NaN whose bits are all ones would become -0, and the run go on with it.
    target.copy_(rounded.where(values.isfinite(), values))
