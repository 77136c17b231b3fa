"""What monitors measure: this rank's share of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.local import local, num_parts


@dataclass(frozen=True)
class MonitoredModel:
    """What monitors measure on this rank.

    Attributes:
        module: this rank's part of the model; its forward pass runs hooks.
        parameters: the trained parameters of this rank by name, without duplicates of what
            another rank holds.
        names: names of all parameters of the model, those of other pipeline stages included.
        num_holders: number of ranks that hold the same parameters, whole or in shards.
        device: where sums over ranks are computed; offloaded parameters are elsewhere.
    """

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    names: Collection[str]
    num_holders: int
    device: torch.device

    def shard(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a parameter or of its gradient."""
        return local(tensor)

    def share(self, parameter: Tensor) -> float:
        """Return what this rank's shard counts in a sum over all ranks, so that each counts once.

        Of a parameter in k shards, n ranks hold each shard n / k times.
        """
        return num_parts(parameter) / self.num_holders
