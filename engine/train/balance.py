"""The loads of experts: what balances them from step to step, and their metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.summation import sum_dtype, widen
from ...kernels.torch_private import foreach_add_, foreach_zero_
from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.layers.moe import NUM_OTHER_COUNTS, moe_layers
from ..data.batch import Batch
from ..parallel.mesh import Degrees

if TYPE_CHECKING:
    from ..data.tables import Data

ROUTER = ".router.weight"

log = logging.getLogger(__name__)


def warn_of_capacity(config: ModelConfig, table: Data, degrees: Degrees) -> None:
    """Warn if which tokens experts drop depends on the micro batch and the ranks.

    Args:
        config: the model's config.
        table: the recipe's `[data]`.
        degrees: the ranks along each axis.
    """
    capacity = getattr(getattr(config, "moe", None), "capacity_factor", None)
    is_split = degrees.world > 1 or table.micro_batch < table.global_batch
    if capacity is not None and is_split:
        log.warning(
            "model.moe.capacity_factor counts tokens in each micro batch of each rank: which are "
            "dropped, and so the loss, depends on data.micro_batch and [parallel]"
        )


class Balance:
    """The loads of the experts of all layers and ranks in a step.

    Args:
        model: this rank's part of the model, in memory.
        degrees: the ranks along each axis.
        device: the device of this rank.
    """

    def __init__(self, model: Model, degrees: Degrees, device: torch.device) -> None:
        local_layers = moe_layers(model)
        shapes = {
            f"{name}{ROUTER}": tuple(layer.router.weight.shape)
            for name, layer in local_layers.items()
        }
        # Also the layers of other pipeline stages: all ranks must sum tensors of one shape.
        shapes |= {
            name: shape for name, shape in model.remote_parameters.items() if name.endswith(ROUTER)
        }
        self._order = order = sorted(shapes, key=_by_number)
        self._layers = list(local_layers.values())
        self._rows_of_layers = [order.index(f"{name}{ROUTER}") for name in local_layers]
        experts = max((shape[0] for shape in shapes.values()), default=0)
        self._loads = torch.zeros(
            len(order), experts + NUM_OTHER_COUNTS, dtype=sum_dtype(device), device=device
        )
        self._degrees, self._num_equal = degrees, degrees.world // degrees.data
        self._shares = 1

    @property
    def exists(self) -> bool:
        """Whether the model has experts, on this rank or on another."""
        return len(self._loads) > 0

    def start(
        self,
        factor: float,
        batches: Sequence[Batch],
        sum_over_ranks: Callable[[Tensor, int], None] = lambda count, same: None,
    ) -> None:
        """Prepare for the forward and backward passes of a step; all ranks call it.

        Args:
            factor: multiplies the losses of the step; see `TrainStep.loss_factor`.
            batches: this rank's batches of the step; all have padding or none.
            sum_over_ranks: sums a tensor in place; the second argument is the number of ranks that
                hold the same numbers.
        """
        # Sequences of the step over all ranks, which share them evenly. A split may have its own.
        rows = sum(len(each) * each.rows_per_sample for each in batches) * self._degrees.data
        # Ranks that share a sequence have a mean each.
        self._shares = rows * self._degrees.sequence
        padding = [batch.padding for batch in batches if batch.padding is not None]
        lengths = [batch.ragged for batch in batches if batch.ragged]
        if self.exists and padding:
            # Padding has no load: a layer's mean is over real tokens, of which ranks have
            # unequal numbers.
            tokens = torch.stack([(~mask).sum() for mask in padding]).sum()
            sum_over_ranks(tokens, self._num_equal)
            self._set_token_factor(rows * padding[0].shape[1] / widen(tokens.clamp(min=1)))
        elif self.exists and lengths:
            # Of flat rows the factor has no row length, because they have none in common.
            total = sum(each.total for each in lengths)
            tokens = torch.full((), total, device=self._loads.device)
            sum_over_ranks(tokens, self._num_equal)
            self._set_token_factor(rows / widen(tokens))
        if self._layers:
            foreach_zero_([layer.load_counter for layer in self._layers])
            factors = [layer.loss_factor for layer in self._layers]
            foreach_zero_(factors)
            foreach_add_(factors, factor / self._shares)

    def _set_token_factor(self, factor: Tensor) -> None:
        for layer in self._layers:
            layer.token_factor.copy_(factor)

    def collect(self, sum_over_ranks: Callable[[Tensor], None]) -> None:
        """Sum what the layers of all ranks have counted since `start`; all ranks call it.

        Args:
            sum_over_ranks: sums a tensor over all ranks in place.
        """
        self._loads.zero_()
        for row, layer in zip(self._rows_of_layers, self._layers, strict=True):
            self._loads[row].copy_(layer.load_counter)
        sum_over_ranks(self._loads)

    def loads(self) -> dict[str, Tensor]:
        """Return how many rows each expert of a layer got in the step, by the router's weight."""
        return dict(zip(self._order, self._loads[:, :-NUM_OTHER_COUNTS], strict=True))

    def loss(self) -> Tensor:
        """Return the auxiliary loss of all routers, as the step minimises it; 0 without experts."""
        return self._loads[:, -1].sum() / self._shares

    @torch.no_grad()
    def update(self, is_bad: Tensor | None = None) -> None:
        """Adjust the routers of this rank by the loads of the step.

        Args:
            is_bad: see `TrainStep.update`.
        """
        if not self._layers:
            return
        loads = self._loads[:, :-NUM_OTHER_COUNTS]
        mean = loads.mean(1, keepdim=True)
        # Counts are exact in fp64, so that signs are the same under every parallel plan.
        signs, shares = (mean - loads).sign(), loads / mean.clamp(min=1)
        is_kept = None
        if is_bad is not None:
            signs = signs.masked_fill(is_bad > 0, 0.0)
            is_kept = (mean > 0) & (is_bad == 0)
        for row, layer in zip(self._rows_of_layers, self._layers, strict=True):
            router = layer.router
            # A bias is frozen with the weights: adapters stay with the routing that they were
            # trained for. `router.weight` does not say so: under tensor parallelism it is a view
            # without gradient.
            if router.bias is not None and next(router.parameters()).requires_grad:
                router.bias.add_(signs[row], alpha=layer.settings.bias_rate)
            if router.load is not None:  # it stays where no gradient reaches, so nothing is counted
                is_counted = mean[row] > 0 if is_kept is None else is_kept[row]
                router.load.copy_(shares[row].where(is_counted, router.load))

    def metrics(self) -> dict[str, Tensor]:
        """Return the metrics of the step, on the device.

        Returns:
            `max_violation`: how far the load of the busiest expert lies above the mean
            (arXiv:2408.15664, equation 4), in the worst layer; `mean_violation`: the mean over
            layers; `idle_experts`: experts without a token; `router_entropy`: of a token, in nats;
            `drop_rate`: the share of rows that were dropped.
        """
        loads, (dropped, entropy, _) = (
            self._loads[:, :-NUM_OTHER_COUNTS],
            self._loads[:, -NUM_OTHER_COUNTS:].unbind(1),
        )
        # A layer that no gradient reaches counts nothing, and must not count as balanced.
        is_counted = loads.sum(1) > 0
        violations = (loads.amax(1) / loads.mean(1).clamp(min=1) - 1) * is_counted
        rows = loads.sum().clamp(min=1)
        return {
            "max_violation": violations.amax(),
            "mean_violation": violations.sum() / is_counted.sum().clamp(min=1),
            "idle_experts": ((loads == 0) & is_counted.unsqueeze(1)).sum(),
            "router_entropy": entropy.sum() / rows,
            "drop_rate": dropped.sum() / rows,
        }


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them: block 2 before block 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"\.", name)]
