"""MuonClip (Kimi K2, arXiv:2507.20534, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernels.torch_private import foreach_mul_, functional_collectives
from ..elementwise.base import Group
from ..placement import ParameterPlacement
from .base import MatrixTask
from .muon import MuonOptimizer


class MuonClipOptimizer(MuonOptimizer):
    """Muon that multiplies the queries and keys of heads whose scores have become too large.

    With S the largest score of a head in a step, over all micro batches and ranks, its scores are
    multiplied by min(1, max_score / S) after the update. The host never waits for them.

    Args:
        groups: see `MatrixOptimizer`; placements have `heads`, and each group has `scores`: the
            largest scores that this rank has seen since `zero_grad`, [H], by the path of the
            attention.
        device: see there.
        adamw: see there.
        options: see there.
    """

    def __init__(
        self, groups: Sequence[Group], device: torch.device, adamw: dict[str, Any], **options: Any
    ) -> None:
        super().__init__(groups, device, adamw, **options)
        self._scores: dict[str, Tensor] = {}
        self._factors: list[tuple[Group, int, str, Tensor, Tensor]] = []
        """the group and place of each parameter of heads, the path of the attention, and the head
        and the power of each row that this rank holds"""
        self._max_score = options["max_score"]
        for group in self.param_groups:
            self._scores = group.pop("scores", self._scores)
            for place, placement in enumerate(group["placements"]):
                if placement.heads and any(power for _, power in placement.heads.powers):
                    path = placement.name.rsplit(".", 2)[0]
                    self._factors.append((group, place, path, *_find_rows(placement, device)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and the scores of the step."""
        super().zero_grad(set_to_none)
        for found in self._scores.values():
            found.fill_(-math.inf)

    def step_matrices(self, tasks: Sequence[MatrixTask]) -> None:
        """Update matrices, and then shrink queries and keys."""
        super().step_matrices(tasks)
        if not self._scores:
            return
        largest = torch.cat(list(self._scores.values()))
        if self._group is not None:
            largest = functional_collectives.all_reduce(largest, "max", self._group)
        factors = self._max_score / largest.clamp(min=self._max_score)
        sizes = [found.numel() for found in self._scores.values()]
        by_path = dict(zip(self._scores, torch.split(factors, sizes), strict=True))
        weights, multipliers = [], []
        for group, place, path, heads, powers in self._factors:
            weight = group["params"][place]
            rows = by_path[path][heads].pow(powers).to(weight)
            weights.append(weight)
            multipliers.append(rows if weight.ndim == 1 else rows.unsqueeze(1))
        foreach_mul_(weights, multipliers)


def _find_rows(placement: ParameterPlacement, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the head, and the power of a factor, of each row that this rank holds."""
    rows = placement.heads
    assert rows is not None, "only parameters of heads have such rows"
    powers = [power for count, power in rows.powers for _ in range(count)]
    first, end = placement.part(placement.rank)[0]
    heads = torch.arange(rows.heads).repeat_interleave(len(powers))[first:end]
    return heads.to(device), torch.tensor(powers * rows.heads)[first:end].to(device)
