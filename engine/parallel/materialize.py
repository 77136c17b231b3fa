"""Initial weights that are the same bits on any number of ranks and under any plan."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...kernels.summation import sum_dtype
from ...model_zoo.base import Constant, Model, Normal
from ..checkpoint.box import Box, contiguous_box

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# Each block of so many elements has a random stream of its own, so that a rank can draw any part of
# a tensor. Another number would give other initial weights.
BLOCK = 2**20
CHUNK = 16 * BLOCK
"""the most elements that are drawn at a time where a rank holds some columns; at least one row"""


@contextmanager
def without_storage() -> Iterator[None]:
    """Build modules on `meta`, skipping `torch.nn.init`, which imports torch's compiler there."""
    with torch.device("meta"), _SkipInit():
        yield


class _SkipInit(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def materialize(
    model: Model,
    device: torch.device,
    seed: int,
    *,
    fill: bool | Callable[[str], bool] = True,
) -> None:
    """Give a model on `meta` its memory, initial weights and buffers, without communication.

    A weight's values depend on the seed, its name and its shape alone.

    Args:
        model: a model whose parameters are plain tensors or DTensors.
        device: the device on which parameters and buffers are allocated.
        seed: the seed of the initial weights.
        fill: whether weights get initial values; False leaves them for a checkpoint to fill. A
            function takes a parameter's name and returns whether it is filled here.
    """
    model._apply(lambda tensor: _empty(tensor, device))  # type: ignore[no-untyped-call]
    model.init_buffers(device)
    wanted = fill if callable(fill) else lambda _: fill
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if wanted(name):
                _fill(parameter, model.initial_values(name), f"{seed}:{name}")


@torch.no_grad()
def draw_weights(model: Model, names: Collection[str], seed: str) -> None:
    """Give weights of a model other initial values, without communication.

    Args:
        model: a model in memory.
        names: the names of the weights.
        seed: other texts give other values.
    """
    for name, parameter in model.named_parameters():
        if name in names:
            _fill(parameter, model.initial_values(name), f"{seed}:{name}")


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    if type(tensor) in (Tensor, nn.Parameter):
        # Sums are kept in fp64 where the device has it.
        dtype = sum_dtype(device) if tensor.dtype is torch.float64 else tensor.dtype
        # Not empty_like, as in Module.to_empty: of a `meta` tensor, it imports torch's compiler.
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    return torch.empty_like(tensor, device=device)


def _fill(parameter: nn.Parameter, rule: Normal | Constant, key: str) -> None:
    if type(parameter) is not nn.Parameter:
        _fill_shard(cast("DTensor", parameter), rule, key)
    elif isinstance(rule, Constant):
        parameter.fill_(rule.value)
    else:
        _fill_normal(parameter.data, rule, key, 0, parameter.numel())


def _fill_shard(parameter: DTensor, rule: Normal | Constant, key: str) -> None:
    # Importing it takes half as long as torch itself; only sharded runs pay.
    from torch.distributed.tensor import distribute_tensor

    local, box = parameter.to_local(), contiguous_box(parameter)
    if isinstance(rule, Constant):
        local.fill_(rule.value)
    elif box is None:
        # Strided shards are no contiguous part of the tensor: draw all of it and cut. No rank is
        # the source (None), because each has drawn the same values: nothing is broadcast.
        full = torch.empty(parameter.shape, device=local.device)
        _fill_normal(full, rule, key, 0, parameter.numel())
        mesh, placements = parameter.device_mesh, parameter.placements
        local.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None).to_local())
    elif box.is_rows(parameter.shape):
        # Shape and numel of a DTensor are those of the whole parameter.
        start = box.start[0] * math.prod(parameter.shape[1:])
        _fill_normal(local, rule, key, start, parameter.numel())
    elif local.numel():
        _fill_columns(local, box, parameter.shape, rule, key)


def _fill_columns(local: Tensor, box: Box, shape: Sequence[int], rule: Normal, key: str) -> None:
    """Fill a part of a tensor by way of its rows, a few at a time.

    Args:
        local: the part that this rank holds.
        box: where this part lies in the whole tensor.
        shape: the shape of the whole tensor.
        rule: the distribution of the values.
        key: the seed and the parameter's name.
    """
    row = math.prod(shape[1:])
    low, high = box.span(shape)
    most = min(max(1, CHUNK // row), len(local))
    buffer = torch.empty(most, *shape[1:])
    for first, last in box.chunks(most):
        rows = buffer[: last - first]
        # From this rank's first element in the first row to its last one in the last row. What is
        # drawn between them belongs to other ranks, and is not copied.
        touched = rows.view(-1)[low : rows.numel() - row + high]
        _fill_normal(touched, rule, key, first * row + low, math.prod(shape))
        at = first - box.start[0]
        local[at : at + last - first].copy_(box.columns(rows))


def _fill_normal(target: Tensor, rule: Normal, key: str, start: int, total: int) -> None:
    """Fill with the elements start, start + 1, ... of the `total` that `key` stands for."""
    flat = target.view(-1)
    stop = start + flat.numel()

    def fill_block(block: int) -> None:
        origin = block * BLOCK
        # The whole block even where a part is needed: which values are drawn again, and as what,
        # depends on all of them.
        values = _normal(f"{key}:{block}", min(BLOCK, total - origin))
        first, last = max(start, origin), min(stop, origin + BLOCK)
        # Scaled in fp32; the assignment rounds to the parameter's dtype and copies to its device.
        part = torch.from_numpy(values[first - origin : last - origin]).mul_(rule.std)
        flat[first - start : last - start] = part

    blocks = range(start // BLOCK, -(-stop // BLOCK))
    # numpy draws without the interpreter's lock.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill_block, blocks))


def _normal(key: str, count: int) -> NDArray[np.float32]:
    """Return standard normal values; those beyond three are drawn again."""
    # Not torch's generators: their values differ between CPU and GPU, and on a CPU mesh torch 2.13
    # draws the same values for every shard of a DTensor.
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    values = generator.standard_normal(count, dtype=np.float32)
    while (beyond := np.flatnonzero(np.abs(values) > 3)).size:
        values[beyond] = generator.standard_normal(beyond.size, dtype=np.float32)
    return values
