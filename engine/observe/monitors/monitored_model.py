"""What monitors measure: this rank's share of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import RecipeError, nearest
from ...core.local import local, num_parts
from ...core.text.expressions import match_names

_LAYER = re.compile(r"(.*?\.\d+)\.")


class ParameterGroups(NamedTuple):
    """Parameters that are measured together.

    Attributes:
        names: of the groups, the same on all ranks.
        weights: the parameters of this rank that are measured.
        places: for each of them the index of its group.
    """

    names: list[str]
    weights: list[nn.Parameter]
    places: list[int]


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

    def group(self, pattern: str = "*", *, by_layer: bool) -> ParameterGroups:
        """Return the parameters whose names match a pattern, by layer or each by itself.

        Raises:
            RecipeError: no parameter of the model matches.
        """
        matches = match_names(pattern)
        groups = {
            name: layer_of(name) if by_layer else name for name in self.names if matches(name)
        }
        if not groups:
            raise RecipeError(
                f'metrics.monitors: "{pattern}" matches no weight', nearest(pattern, self.names)
            )
        # Sorted, because all ranks must add up the same order of groups.
        names = sorted(set(groups.values()), key=_by_number)
        mine = [name for name in self.parameters if name in groups]
        weights = [self.parameters[name] for name in mine]
        return ParameterGroups(names, weights, [names.index(groups[name]) for name in mine])


def layer_of(name: str) -> str:
    """Return the layer of a parameter: up to its block's number, else its module."""
    match = _LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0] or name


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them: block 2 before block 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
