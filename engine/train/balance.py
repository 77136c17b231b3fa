"""What balances the load of experts from step to step, and measures it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...model_zoo.layers.moe import NUM_OTHER_COUNTS, moe_layers

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ..data.tables import Data
    from ..parallel.mesh import Degrees

ROUTER = ".router.weight"

log = logging.getLogger(__name__)


def warn_of_capacity(config: ModelConfig, table: Data, degrees: Degrees) -> None:
    """Warn if experts drop tokens by their number in a part of a batch.

    Args:
        config: the model's.
        table: how large a batch is, and a micro batch.
        degrees: of the ranks.
    """
    capacity = getattr(getattr(config, "moe", None), "capacity_factor", None)
    is_split = degrees.world > 1 or table.micro_batch < table.global_batch
    if capacity is not None and is_split:
        log.warning(
            "model.moe.capacity_factor counts tokens in each micro batch of each rank: which are "
            "dropped, and so the loss, depends on data.micro_batch and [parallel]"
        )


class Balance:
    """The loads of all experts of all ranks in a step, and what follows from them.

    Args:
        model: in memory; this rank's part of it.
        degrees: of the ranks.
        rows: sequences of a step over all ranks.
        device: of this rank.
    """

    def __init__(
        self, model: LanguageModel, degrees: Degrees, rows: int, device: torch.device
    ) -> None:
        mine = moe_layers(model)
        shapes = {f"{name}{ROUTER}": tuple(each.router.weight.shape) for name, each in mine.items()}
        shapes |= {name: shape for name, shape in model.elsewhere.items() if name.endswith(ROUTER)}
        order = sorted(shapes, key=_by_number)
        self._layers = list(mine.values())
        self._places = [order.index(f"{name}{ROUTER}") for name in mine]
        experts = max((shape[0] for shape in shapes.values()), default=0)
        self._found = torch.zeros(
            len(order), experts + NUM_OTHER_COUNTS, dtype=torch.float64, device=device
        )
        self._rows, self._same = rows, degrees.world // degrees.data
        # Ranks that share a sequence have a mean each.
        self._shares = rows * degrees.sequence

    @property
    def exists(self) -> bool:
        """Whether any rank has experts."""
        return len(self._found) > 0

    def start(
        self,
        factor: float,
        masks: Sequence[Tensor | None] = (),
        sum_over_ranks: Callable[[Tensor, int], None] = lambda count, same: None,
    ) -> None:
        """Prepare for the passes of a step; all ranks call it.

        Args:
            factor: what multiplies the losses of the step, see `TrainStep.loss_factor`.
            masks: of padding, of this rank's batches: all are given or none.
            sum_over_ranks: sums a tensor, of which so many ranks have the same, in place.
        """
        padding = [mask for mask in masks if mask is not None]
        if self.exists and padding:
            tokens = torch.stack([(~mask).sum() for mask in padding]).sum()
            sum_over_ranks(tokens, self._same)
            token_factor = self._rows * padding[0].shape[1] / tokens.clamp(min=1).double()
            for layer in self._layers:
                layer.token_factor.copy_(token_factor)
        if self._layers:
            torch._foreach_zero_([layer.load_counter for layer in self._layers])
            factors = [layer.loss_factor for layer in self._layers]
            torch._foreach_zero_(factors)
            torch._foreach_add_(factors, factor / self._shares)

    def collect(self, sum_over_ranks: Callable[[Tensor], None]) -> None:
        """Take what the layers of all ranks have counted since the start; all ranks call it.

        Args:
            sum_over_ranks: sums a tensor in place.
        """
        self._found.zero_()
        for place, layer in zip(self._places, self._layers, strict=True):
            self._found[place].copy_(layer.load_counter)
        sum_over_ranks(self._found)

    def loss(self) -> Tensor:
        """Return what the routers' losses add to what the step minimises: 0 without experts."""
        return self._found[:, -1].sum() / self._shares

    @torch.no_grad()
    def update(self) -> None:
        """Let the routers of this rank know the loads that were found."""
        loads = self._found[:, :-NUM_OTHER_COUNTS]
        mean = loads.mean(1, keepdim=True)
        # Counts are exact in fp64, so that every plan finds the same signs.
        signs, shares = (mean - loads).sign(), loads / mean.clamp(min=1)
        for place, layer in zip(self._places, self._layers, strict=True):
            router = layer.router
            # A bias is frozen with the weights: adapters go with what they were trained beside. Not
            # `router.weight`, which tensor parallelism makes a view without gradient.
            if router.bias is not None and next(router.parameters()).requires_grad:
                router.bias.add_(signs[place], alpha=layer.settings.bias_rate)
            if router.load is not None:
                router.load.copy_(shares[place])

    def measures(self) -> dict[str, Tensor]:
        """Return scalars of the step, for the log; nothing waits for the device.

        `max_violation` is how far the busiest expert's load lies above the mean (arXiv:2408.15664,
        equation 4), of the worst layer; `mean_violation` its mean over layers. `idle_experts` had
        no token. `router_entropy` is a token's, in nats, and `drop_rate` a share of rows.
        """
        loads, (dropped, entropy, _) = (
            self._found[:, :-NUM_OTHER_COUNTS],
            self._found[:, -NUM_OTHER_COUNTS:].unbind(1),
        )
        # Layers that no gradient reaches count nothing.
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
    """Return what sorts names by the numbers in them, not by their digits."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"\.", name)]
