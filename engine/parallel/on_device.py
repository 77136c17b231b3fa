"""The exchange of tokens between expert ranks in which the host never waits for row counts.

Experimental: it was not measured on GPUs yet. Rows are pulled out of the other GPUs' symmetric
memory by a Triton kernel (`kernels/all_to_all`), so that their number need not be known on the
host; tensors have room for the most rows that can arrive, and those past the last one are zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_to_all.exchange import Exchange, make_exchange
from ...kernels.permute.permutation import Permutation
from ...kernels.registry import INTERPRETED
from ...model_zoo.layers.experts import TokenExchange
from ..core.errors import EnvironmentFault
from .collectives import Splits, start_all_to_all, wait

ROW_BYTES = 16
"""A row's weight travels in a row of so many bytes, the least that a kernel copies."""


def require_device(device: torch.device) -> None:
    """Refuse a device without symmetric memory, unless Triton's interpreter runs.

    Raises:
        EnvironmentFault: the device is no GPU.
    """
    if device.type != "cuda" and not INTERPRETED:
        kind = device.type.upper()
        message = f'parallel.expert_exchange = "on_device" needs GPUs, and this is a {kind}'
        raise EnvironmentFault(message, 'set it to "all_to_all"')


@dataclass(frozen=True)
class OnDeviceExchange(TokenExchange):
    """Sends tokens to the ranks that hold their experts, and the outputs back.

    Attributes:
        expert_group: process group over which the experts of the layer are divided.
        permutation: the kernel that sorts tokens by expert.
        capacity_factor: of the layer's settings; with one, no more than this times a rank's own
            rows can arrive, without one those of all ranks.
        is_simulated: the other ranks do not exist.
    """

    expert_group: ProcessGroup
    permutation: Permutation
    capacity_factor: float | None
    is_simulated: bool = False
    _exchanges: dict[Any, Exchange] = field(default_factory=dict, repr=False)

    def dispatch(self, rows: Tensor, weight: Tensor, offs: Tensor) -> tuple[Any, ...]:
        """Send tokens to the ranks of their experts; return the arguments of `compute`.

        Args:
            rows: token activations sorted by expert, [M, D].
            weight: the router's weight of each token, [M].
            offs: exclusive end of each expert's tokens in `rows`, int32 [E].
        """
        ranks = self.expert_group.size()
        counts = torch.diff(offs, prepend=offs.new_zeros(1))
        even = [len(counts) // ranks] * ranks
        arriving = wait(start_all_to_all(counts, Splits(even, even), self.expert_group))
        splits = counts.view(ranks, -1).sum(1)
        most = max(len(rows), self._most_rows(len(rows), len(counts)))
        exchange = self._exchange(rows, most)
        rows_here, received = exchange(rows, splits)
        # Weights are multiplied in before the last product, so they go along.
        padded = F.pad(weight.unsqueeze(1), (0, ROW_BYTES // weight.element_size() - 1))
        weight_here, _ = self._exchange(padded, most)(padded, splits)
        return rows_here, weight_here[:, 0], arriving, received, exchange, len(rows)

    def compute(self, experts: Callable[[Tensor, Tensor, Tensor], Tensor], *sent: Any) -> Tensor:
        """Compute this rank's experts and send the outputs back, [M, D].

        Args:
            experts: computes rows, weights and offsets as `Experts.compute`.
            sent: what `dispatch` returned: activations and weights of all tokens for this rank's
                experts, the number from each rank for each expert [ranks * local experts], and from
                each rank, the exchange, and M.
        """
        rows, weight, arriving, received, exchange, count = sent
        local = len(arriving) // self.expert_group.size()
        # Rows arrive by sender and then by expert. One more expert takes the rows after the last.
        ends = arriving.cumsum(0)
        place = torch.arange(len(rows), device=rows.device)
        sender_expert = torch.searchsorted(ends, place, right=True)
        chosen = torch.where(place < ends[-1], sender_expert % local, local)
        plan = self.permutation.plan(chosen.unsqueeze(1), local + 1)
        is_behind = place >= plan.offs[local - 1]

        def gather(each: Tensor) -> Tensor:
            # Products leave rows behind all experts' undefined, and their gradients.
            return self.permutation.gather(each, plan).masked_fill(is_behind.unsqueeze(1), 0)

        outputs = experts(gather(rows), gather(weight.unsqueeze(1)).squeeze(1), plan.offs[:local])
        outputs = outputs.masked_fill(is_behind.unsqueeze(1), 0)
        own_outputs: Tensor = exchange(self.permutation.combine(outputs, plan), received)[0]
        return own_outputs[:count]

    def _most_rows(self, rows: int, experts: int) -> int:
        """Return the most rows that can arrive where every rank has `rows`."""
        if self.capacity_factor is None:
            return rows * self.expert_group.size()
        # Each rank keeps at most this many rows for each expert (`MoE._plan`).
        return experts * math.ceil(self.capacity_factor * rows / experts)

    def _exchange(self, rows: Tensor, most: int) -> Exchange:
        """Return the exchange of rows like these; all ranks have as many, and make it together."""
        key = (most, rows.shape[1], rows.dtype)
        if key not in self._exchanges:
            self._exchanges[key] = self._make(rows, most)
        return self._exchanges[key]

    def _make(self, rows: Tensor, most: int) -> Exchange:
        if self.is_simulated:

            def shuffle(x: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
                return x.new_zeros(most, x.shape[1]), splits.clone()

            return Exchange(shuffle, most, "simulated")
        return make_exchange(
            self.expert_group,
            rows.device,
            most,
            rows.shape[1],
            rows.dtype,
            implementation="symmetric" if rows.is_cuda else "torch",
        )
