"""A client's state as a message: what its round starts with, and what it ends with.

Tensors are `optimizer.PARAMETER.KEY` and `rng.RANK.KIND`; others stand beside them under prefixes
of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...checkpoint.state import optimizer_numbers, optimizer_state
from ...train.parts import Parts
from ..client import Client
from ..optimizer_policy import State
from .mailbox import Message


def pack_client(parts: Parts, client: Client) -> tuple[Message, dict[str, Tensor]]:
    """Return the numbers and tensors of a client, and the state that the optimizer has for it."""
    numbers = {
        "batch": client.batch,
        "loss_scale": client.loss_scale,
        "health": client.health.state(),
        "optimizer": optimizer_numbers(parts.model, parts.optimizer),
    }
    return numbers, optimizer_state(parts.model, parts.optimizer) | client.random


def unpack_client(
    parts: Parts, client: Client, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> State:
    """Give a client what `pack_client` returned, and return the optimizer's state for it."""
    client.seek(numbers["batch"])
    client.loss_scale = numbers["loss_scale"]
    client.health.restore(numbers["health"])
    client.random = {name: each for name, each in tensors.items() if name.startswith("rng.")}
    weights = dict(parts.model.named_parameters())
    state: State = defaultdict(dict)
    values: dict[str, Any] = {**select_under("optimizer.", tensors), **numbers["optimizer"]}
    for name, value in values.items():
        parameter, _, key = name.rpartition(".")
        state[weights[parameter]][key] = value
    return state


def name_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with a prefix before each name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def select_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
