"""How gradients change weights: after the backward pass, or within it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.local import local, num_parts
from ..optim.lean import plain_step


def global_norm(
    gradients: Sequence[tuple[Tensor, Tensor]], holders: int, device: torch.device
) -> Tensor:
    """Return the L2 norm of gradients over all ranks.

    Args:
        gradients: split over ranks in any way, each with the part of it that this rank holds.
        holders: ranks that hold the same gradients, whole or in parts.
        device: where the ranks' collectives are; offloaded gradients are elsewhere.
    """
    if holders == 1 and not dist.is_initialized():
        return torch.nn.utils.get_total_norm([part for _, part in gradients], foreach=True)
    by_count: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, part in gradients:
        by_count[num_parts(gradient)].append(part)
    # Each part is held by as many ranks: it counts once.
    squares = [
        torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).square().sum()
        * (count / holders)
        for count, tensors in by_count.items()
    ]
    total = torch.stack(squares).sum().to(device)
    dist.all_reduce(total)
    return total.sqrt()


class UpdateInBackward:
    """Steps one optimizer parameter by parameter; its state is that of any other run.

    Args:
        optimizer: whose weights get hooks.
        late: weights whose gradients are complete only after the backward pass.
        ranks: that hold the same gradients, whole or in parts.
        device: where the ranks' collectives are; offloaded weights are elsewhere.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        late: Collection[nn.Parameter],
        ranks: int,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._apply = plain_step(optimizer)
        self._device = device
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norms = torch.zeros(len(weights), device=weights[0].device)
        shares = torch.tensor([num_parts(weight) / ranks for weight in weights])
        self._norms, self._shares = norms, shares.to(norms.device)
        self._groups: list[dict[str, Any]] = []
        self._late: list[partial[None]] = []
        self._has_rate = False
        late_ones = {id(weight) for weight in late}
        places = iter(norms.unbind())
        for group in optimizer.param_groups:
            for weight in group["params"]:
                alone = {**group, "params": [weight]}
                self._groups.append(alone)
                update = partial(self._update, alone, next(places), weight)
                if id(weight) in late_ones:
                    self._late.append(update)
                else:
                    weight.register_post_accumulate_grad_hook(lambda _, update=update: update())

    def set_rate(self, lr_factor: float) -> None:
        """Set each weight's rate to its peak times `lr_factor`, for one backward pass."""
        for group in self._groups:
            group["lr"] = group["peak_lr"] * lr_factor
        self._has_rate = True

    def start(self) -> None:
        """Prepare for a backward pass.

        Raises:
            RuntimeError: its rate has not been set.
        """
        if not self._has_rate:
            raise RuntimeError("optimizer_in_backward: call set_rate before accumulate")
        self._has_rate = False
        self._norms.zero_()

    @torch.no_grad()
    def _update(self, alone: dict[str, Any], norm: Tensor, weight: nn.Parameter) -> None:
        if weight.grad is None:
            return
        gradient = local(weight.grad)
        if self._device.type == "cuda" and not gradient.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # it may still be on its way here
        torch.linalg.vector_norm(gradient, dtype=norm.dtype, out=norm)
        every = self._optimizer.param_groups
        self._optimizer.param_groups = [alone]
        try:
            self._apply()
        finally:
            self._optimizer.param_groups = every
        weight.grad = None

    def finish(self) -> Tensor:
        """Update the weights that were late; return the L2 norm of all gradients."""
        for update in self._late:
            update()
        total = (self._norms.square() * self._shares).sum().to(self._device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.sqrt()
