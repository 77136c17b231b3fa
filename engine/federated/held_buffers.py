"""Saved buffers that do not travel between the server and its clients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.local import local
from .client import Client


class HeldBuffers:
    """Gives the model the buffers with which a client's round starts.

    Args:
        buffers: the buffers of the model, by name; their values are the initial ones.
        keeps: whether clients keep their own between rounds.
    """

    def __init__(self, buffers: Mapping[str, Tensor], *, keeps: bool) -> None:
        self._buffers = buffers
        self._keeps = keeps
        self.take_initial()

    def take_initial(self) -> None:
        """Take the buffers of the model as the initial ones."""
        self._initial = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    @torch.no_grad()
    def begin(self, client: Client) -> None:
        """Fill the buffers before a client trains."""
        self.fill(self.starting_for(client))

    def starting_for(self, client: Client) -> dict[str, Tensor]:
        """Return the buffers with which a client's round starts, by name."""
        return {name: client.buffers.get(name, each) for name, each in self._initial.items()}

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers of the model, by name."""
        return self._buffers

    @torch.no_grad()
    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Give the model values of all buffers."""
        for name, buffer in self._buffers.items():
            local(buffer).copy_(local(values[name]))

    @torch.no_grad()
    def end(self, client: Client) -> None:
        """Keep a client's buffers after it has trained, and restore the initial ones."""
        for name, buffer in self._buffers.items():
            if self._keeps:
                kept = client.buffers.setdefault(name, buffer.detach().clone())
                local(kept).copy_(local(buffer))
            local(buffer).copy_(local(self._initial[name]))
