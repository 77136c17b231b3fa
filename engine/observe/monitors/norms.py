"""Norms of weights, gradients and updates, of each layer or parameter."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ....kernels.summation import sum_dtype, widen
from ....kernels.torch_private import foreach_norm, foreach_sub_
from ...core.local import local, norm_dtype
from ..numbers import Mean, Number
from ..tables import Monitor, NormKind
from .monitored_model import MonitoredModel

KEYS: dict[NormKind, str] = {
    "weights": "weight_norm",
    "gradients": "grad_norm",
    "updates": "update_norm",
    "update_ratios": "update_ratio",
}


class NormMonitor(Monitor):
    """Measures L2 norms over all ranks, whatever shards of a parameter each of them holds.

    A layer without trained parameters on any rank has no number.

    Args:
        model: what is measured.
        kinds: which norms; see `Norms.of`.
        by_layer: one norm for each layer, else for each parameter.
    """

    def __init__(
        self, model: MonitoredModel, kinds: Collection[NormKind], *, by_layer: bool
    ) -> None:
        self._groups, self._weights, rows = model.group(by_layer=by_layer)
        self._kinds = kinds
        self._rows = torch.tensor(rows, dtype=torch.int64, device=model.device)
        shares = [model.share(weight) for weight in self._weights]
        self._shares = torch.tensor(shares, dtype=sum_dtype(model.device), device=model.device)
        self._old: list[Tensor] = []
        self.num_sums = 4 * len(self._groups)

    def before_update(self, sums: Tensor, clip_factor: Tensor | None) -> None:
        """Add up squares of weights and gradients, and copy the weights for the update norms."""
        count, weights, gradients, _ = sums.view(4, -1)
        count.index_add_(0, self._rows, self._shares)
        parts = [local(weight) for weight in self._weights]
        if {"weights", "update_ratios"} & {*self._kinds}:
            self._add_squares(weights, parts)
        if "gradients" in self._kinds:
            empty = [part.new_empty(0) for part in parts]
            self._add_squares(
                gradients,
                [
                    none if weight.grad is None else local(weight.grad)
                    for weight, none in zip(self._weights, empty, strict=True)
                ],
            )
            if clip_factor is not None:
                gradients.div_(widen(clip_factor).square())
        if {"updates", "update_ratios"} & {*self._kinds}:
            self._old = [part.clone() for part in parts]

    def after_update(self, sums: Tensor) -> None:
        """Add up the squared differences between the weights and their copies."""
        if self._old:
            # In place: another list of differences would double the memory.
            foreach_sub_(self._old, [local(weight) for weight in self._weights])
            self._add_squares(sums.view(4, -1)[3], self._old)
            self._old = []

    def _add_squares(self, sums: Tensor, parts: list[Tensor]) -> None:
        if not parts:
            return
        norms = torch.stack(foreach_norm(parts, dtype=norm_dtype(parts))).to(sums.device)
        sums.index_add_(0, self._rows, widen(norms).square() * self._shares)

    def metrics(self, sums: Tensor) -> dict[str, Number]:
        """Return `weight_norm/LAYER` and the other norms."""
        count, weights, gradients, updates = sums.view(4, -1)
        values = {
            "weights": weights.sqrt(),
            "gradients": gradients.sqrt(),
            "updates": updates.sqrt(),
            "update_ratios": (updates / weights).sqrt(),
        }
        # A row leaves out a mean of nothing, so that no layer without weights appears.
        exists = widen(count > 0)
        return {
            f"{KEYS[kind]}/{group}": Mean(*pair)
            for kind in self._kinds
            for group, *pair in zip(self._groups, values[kind], exists, strict=True)
        }
