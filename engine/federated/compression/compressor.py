"""Compresses pseudo-gradients on their way to the server and back, with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ...checkpoint.box import local_box
from ...core.local import is_split, local
from .codecs import Codec

Gradient = Mapping[str, Tensor]


class Compressor:
    """Turns pseudo-gradients into what the other end receives, and counts the bytes.

    Tensors are encoded whole, one at a time, so that no plan changes a number. What a client's
    codec loses is added to that client's next pseudo-gradient (error feedback, Seide et al. 2014,
    Karimireddy et al. 2019, arXiv:1901.09847).

    Args:
        codec: the codec; None sends fp32.
        weights: the compressed weights by name; other tensors travel in fp32.
        feedback: share of its compression error that a client adds to its next pseudo-gradient;
            0: clients keep no error. Below 1: SparseLoCo, arXiv:2508.15706, algorithm 1.
    """

    def __init__(
        self, codec: Codec | None, weights: Mapping[str, Tensor], *, feedback: float
    ) -> None:
        self._codec = codec
        self._weights = weights
        self._feedback = feedback

    @property
    def is_lossy(self) -> bool:
        """Whether what arrives differs from what is sent."""
        return self._codec is not None

    def begin_errors(self) -> dict[str, Tensor]:
        """Return what a codec has lost before the first round: zeros; nothing without feedback."""
        if self._codec is None or not self._feedback:
            return {}
        return {name: torch.zeros_like(weight) for name, weight in self._weights.items()}

    def send(
        self,
        errors: dict[str, Tensor],
        gradient: Gradient,
        payloads: dict[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], int]:
        """Return what the server receives of a pseudo-gradient, and the bytes that travel.

        Args:
            errors: what the codec has lost of this client's pseudo-gradients so far; changed.
            gradient: this rank's shards.
            payloads: gets the encoded tensors by name, uint8.
        """
        received, total = dict(gradient), 0
        for name, value in gradient.items():
            weight = self._weights.get(name)
            if self._codec is None or weight is None:
                total += _count_fp32(value, weight)
                continue
            if name in errors:
                value = local(errors[name]).mul_(self._feedback).add_(value)
            whole = _gather(weight, value)
            data = self._codec.encode(whole.view(-1))
            arrived = self._codec.decode(data, whole.numel())
            received[name] = _own_part(weight, arrived.view(whole.shape))
            total += data.numel()
            if payloads is not None:
                payloads[name] = data
            if name in errors:
                # A client whose weights were not finite once would never be merged again.
                value.sub_(received[name]).nan_to_num_(0.0, 0.0, 0.0)
        return received, total

    def receive(self, payloads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards of what another client's `send` has encoded."""
        assert self._codec is not None, "without a codec there are no payloads"
        received = {}
        for name, data in payloads.items():
            weight = self._weights[name]
            arrived = self._codec.decode(data, weight.numel())
            received[name] = _own_part(weight, arrived.view(weight.shape))
        return received

    def send_back(self, merged: Gradient) -> tuple[dict[str, Tensor], int]:
        """Return what clients receive of the merged pseudo-gradient, and the bytes for each.

        The server steps with the same numbers, so that clients can step themselves.
        """
        received, total = dict(merged), 0
        for name, value in merged.items():
            weight = self._weights.get(name)
            if self._codec is None or weight is None:
                total += _count_fp32(value, weight)
                continue
            whole = _gather(weight, value)
            data = self._codec.encode_merged(whole.view(-1))
            arrived = self._codec.decode_merged(data, whole.numel())
            received[name] = _own_part(weight, arrived.view(whole.shape))
            total += data.numel()
        return received, total


def _count_fp32(value: Tensor, weight: Tensor | None) -> int:
    return 4 * (value if weight is None else weight).numel()


def _gather(weight: Tensor, value: Tensor) -> Tensor:
    """Return the whole tensor of which this rank has a part, as it has of a weight."""
    if not is_split(weight):
        return value
    placed = torch.empty_like(weight)
    local(placed).copy_(value)
    whole: Tensor = cast("Any", placed).full_tensor()
    return whole


def _own_part(weight: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, as it has one of a weight; on its device."""
    box = local_box(weight)
    part = local(weight)
    return part.new_empty(part.shape) if box is None else box.view(whole).to(part.device)
