"""The state that is saved: weights, optimizer state, random number generators."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.torch_private import foreach_norm
from ..core.local import SCALE, distribute_like, is_split, local
from ..optim.placement import OWNED

Description = Mapping[str, Any]
"""A tensor's `shape` and `dtype`, as the manifest lists them."""


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by `model.NAME`; a tied weight appears once."""
    weights = dict(model.named_parameters())
    every = model.state_dict(keep_vars=True)
    # A tied weight has several names and one memory: it is saved once.
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(weights)
    return {f"model.{name}": value.detach() for name, value in every.items() if name not in shared}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors by `optimizer.PARAMETER.KEY`."""
    return {
        f"optimizer.{name}.{key}": value
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def find_non_finite(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors in which a number of this rank is NaN or infinite."""
    parts = {name: local(tensor) for name, tensor in state.items() if tensor.is_floating_point()}
    # Norms of empty tensors raise, and float8 has no norm.
    parts = {name: part for name, part in parts.items() if part.numel() and part.itemsize > 1}
    # One fused call instead of a kernel and a host sync for each tensor.
    largest = foreach_norm(list(parts.values()), math.inf) if parts else []
    return [name for name, norm in zip(parts, largest, strict=True) if not norm.isfinite()]


def optimizer_numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the optimizer's plain numbers by `PARAMETER.KEY`, for the manifest."""
    return {
        f"{name}.{key}": value
        for name, weight in model.named_parameters()
        for key, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, (int, float))
    }


def prepare_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Description],
    numbers: Mapping[str, float],
) -> None:
    """Give a fresh optimizer the state that a checkpoint will be read into.

    Optimizers create their state at the first step; a resumed one needs it before. A tensor of the
    parameter's shape, or of scales of blocks, is laid out like the parameter. Any other one is
    whole on each rank, or where the optimizer's `make_state` says: the state of a matrix is whole
    on the rank that owns it.
    """
    make_state = getattr(optimizer, "make_state", _make_whole)
    for name, weight in model.named_parameters():
        prefix = f"optimizer.{name}."
        for full_name, description in _under(prefix, saved):
            key, shape = full_name.removeprefix(prefix), description["shape"]
            dtype = getattr(torch, description["dtype"].removeprefix("torch."))
            # Moments follow the parameter's placement, so that each rank reads its shard alone.
            if list(shape) == list(weight.shape) and OWNED not in key:
                value = torch.empty_like(weight, dtype=dtype, requires_grad=False)
            elif key.endswith(SCALE) and is_split(weight):
                part = local(weight)
                blocks = part.shape[-1] * shape[-1] // weight.shape[-1]
                scales = part.new_empty((*part.shape[:-1], blocks), dtype=dtype)
                value = distribute_like(weight, scales, shape)
            else:
                value = make_state(weight, key, shape, dtype)
            if value is not None:
                optimizer.state[weight][key] = value
        for full_name, number in _under(f"{name}.", numbers):
            optimizer.state[weight][full_name.removeprefix(f"{name}.")] = number


def _make_whole(weight: Tensor, _key: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return memory for a state that is whole on each rank."""
    return torch.empty(shape, dtype=dtype, device=weight.device)


def _under(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    # A state key has no dots, so `a.b.` does not match the parameter `a.b.c`.
    return (
        (name, value)
        for name, value in table.items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    )


def random_state(rank: int) -> dict[str, Tensor]:
    """Return this rank's random number generators by `rng.RANK.KIND`."""
    version, words, gauss = random.getstate()
    # The bits of a float: NaN, for none, would not equal itself.
    left = torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64)
    numbers = torch.cat([torch.tensor([version, *words]), left.view(torch.int64)])
    state = {
        f"rng.{rank}.torch": torch.get_rng_state(),
        f"rng.{rank}.python": numbers,
    }
    if torch.cuda.is_available():
        state[f"rng.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(rank: int, state: Mapping[str, Tensor]) -> None:
    """Set this rank's random number generators to a state that `random_state` returned."""
    torch.set_rng_state(state[f"rng.{rank}.torch"])
    saved = state[f"rng.{rank}.python"]
    version, *words = saved[:-1].tolist()
    gauss = saved[-1:].view(torch.float64).item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    if f"rng.{rank}.cuda" in state:
        torch.cuda.set_rng_state(state[f"rng.{rank}.cuda"])


def seed_everything(seed: int, rank: int) -> None:
    """Seed the generators that models may draw from while training, another stream each rank."""
    # A plain sum would give rank 1 of seed 0 the stream of rank 0 of seed 1.
    mixed = (seed * 1_000_003 + rank) % 2**63
    torch.manual_seed(mixed)
    random.seed(mixed)
