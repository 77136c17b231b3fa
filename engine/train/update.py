"""How gradients change weights: after the backward pass, or within it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...kernels.torch_private import (
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    foreach_norm,
)
from ..core.local import local, norm_dtype, num_parts
from ..parallel.axis import ParallelModel
from ..parallel.mesh import Degrees
from ..precision.hardware import LossScale


class UpdateAfterBackward:
    """Clips the gradients of a whole step, and steps the optimizer once.

    Args:
        optimizer: each of its groups has `peak_lr`.
        run_step: steps the groups that the optimizer has at the time.
        clip_norm: largest global gradient norm; 0 does not clip.
        clip_value: largest absolute value of an element of a gradient; 0 does not clip.
        scale: the loss scale that gradients are divided by.
        parallel_model: names the duplicate parameters, which the norm leaves out.
        degrees: of the ranks.
        device: where collectives run; offloaded gradients are elsewhere.
        can_skip: whether the optimizer leaves weights and state as they are where `found_inf` is 1,
            as torch's fused ones do.
    """

    in_backward = False
    """whether weights change while the backward pass runs"""
    clip_factor: Tensor | None = None
    """what `finish` multiplied the gradients by; None: their norm is not clipped"""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run_step: Callable[[], None],
        clip_norm: float,
        clip_value: float,
        scale: LossScale,
        parallel_model: ParallelModel,
        degrees: Degrees,
        device: torch.device,
        *,
        can_skip: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self.run_step = run_step
        self.can_skip = can_skip
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._scale = scale
        self._duplicates = set(map(id, parallel_model.duplicate_parameters))
        self._num_holders = degrees.world // degrees.pipeline
        self._device = device

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups whose values a step uses."""
        return self._optimizer.param_groups

    def start(self, lr_factor: float | None) -> None:
        """Do nothing: rates matter when `apply` is called."""

    def start_backward(self, last: bool) -> None:
        """Do nothing: gradients of all micro batches are there when `finish` is called."""

    def finish(self) -> Tensor:
        """Remove the loss scale, clip the gradients, and return their norm before clipping."""
        weights = [
            weight
            for group in self._optimizer.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        parts = [local(weight.grad) for weight in weights]
        if self._scale.dynamic:
            foreach_mul_(parts, 1 / self._scale.value)
        counted = [
            (weight.grad, part)
            for weight, part in zip(weights, parts, strict=True)
            if id(weight) not in self._duplicates
        ]
        norm = global_norm(counted, self._num_holders, self._device)
        if self._clip_norm > 0 and parts:
            # As torch.nn.utils.clip_grads_with_norm_ (torch 2.13), which refuses tensors of
            # different meshes. No branch on the norm: that would wait for the device.
            factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
            foreach_mul_(parts, factor.to(parts[0].device))
            self.clip_factor = factor
        return norm

    def apply(self, lr_factor: float, is_bad: Tensor | None = None) -> None:
        """Clip the elements of the gradients, which monitors measure before, and step.

        Args:
            lr_factor: multiplies the peak learning rate of each group.
            is_bad: see `TrainStep.update`; needs `can_skip`.
        """
        _set_rates(self.groups, lr_factor)
        weights = [weight for group in self.groups for weight in group["params"]]
        clip_elements([weight.grad for weight in weights], self._clip_value)
        self._optimizer.found_inf = is_bad  # type: ignore[attr-defined] # read by fused kernels
        self.run_step()


class UpdateInBackward:
    """Steps the optimizer with each gradient as soon as that is complete, and frees the gradient.

    Of several micro batches, the last one's backward pass completes the gradients.

    The optimizer's state is that of any other run. Source: Lv et al. 2023, arXiv:2306.09782.

    Args:
        optimizer: its parameters get hooks; each of its groups has `peak_lr`.
        run_step: steps the groups that the optimizer has at the time.
        clip_value: largest absolute value of an element of a gradient; 0 does not clip.
        late: parameters whose gradients are complete only after the backward pass.
        ranks: number of ranks that hold the same gradients, whole or in parts.
        device: where collectives run; offloaded parameters are elsewhere.
    """

    in_backward = True
    can_skip = False
    clip_factor = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run_step: Callable[[], None],
        clip_value: float,
        late: Collection[nn.Parameter],
        ranks: int,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self.run_step = run_step
        self._clip_value = clip_value
        self._device = device
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._norms = torch.zeros(len(weights), device=weights[0].device)
        # Of a weight in k parts, n ranks hold each part n / k times: count each once.
        shares = torch.tensor([num_parts(weight) / ranks for weight in weights])
        self._shares = shares.to(self._norms.device)
        self._is_last = False
        self._groups: list[dict[str, Any]] = []
        self._late_updates: list[partial[None]] = []
        late_ids = set(map(id, late))
        norms = iter(self._norms.unbind())
        for group in optimizer.param_groups:
            for weight in group["params"]:
                own_group = {**group, "params": [weight]}
                self._groups.append(own_group)
                update = partial(self._update, own_group, next(norms), weight)
                # The hook runs before the reductions that follow the backward pass: a gradient
                # that needs one of these (a tied embedding) is not complete by then.
                if id(weight) in late_ids:
                    self._late_updates.append(update)
                else:
                    weight.register_post_accumulate_grad_hook(lambda _, update=update: update())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups whose values a step uses."""
        return [*self._optimizer.param_groups, *self._groups]

    def start(self, lr_factor: float | None) -> None:
        """Set the rates with which the backward pass updates weights.

        Raises:
            ValueError: no factor is given.
        """
        if lr_factor is None:
            raise ValueError("optimizer_in_backward: accumulate needs lr_factor")
        _set_rates(self.groups, lr_factor)
        self._norms.zero_()

    def start_backward(self, last: bool) -> None:
        """Say whether the next backward pass completes the gradients, and so updates weights."""
        self._is_last = last

    @torch.no_grad()
    def _update(self, own_group: dict[str, Any], norm: Tensor, weight: nn.Parameter) -> None:
        if weight.grad is None or not self._is_last:
            return
        gradient = local(weight.grad)
        if self._device.type == "cuda" and not gradient.is_cuda:
            # FSDP copies an offloaded gradient asynchronously: the copy must have arrived.
            torch.cuda.current_stream(self._device).synchronize()
        torch.linalg.vector_norm(gradient, dtype=norm.dtype, out=norm)
        clip_elements([gradient], self._clip_value)
        # torch's optimizers step all groups: this call shall see one parameter.
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [own_group]
        try:
            self.run_step()
        finally:
            self._optimizer.param_groups = groups
        weight.grad = None  # this is what saves memory

    def finish(self) -> Tensor:
        """Update the late parameters, and return the L2 norm of all gradients over all ranks."""
        for update in self._late_updates:
            update()
        total = (self._norms.square() * self._shares).sum().to(self._device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.sqrt()

    def apply(self, lr_factor: float, is_bad: Tensor | None = None) -> None:
        """Do nothing: the weights have changed."""


Update = UpdateAfterBackward | UpdateInBackward
"""how a training step lets its optimizer change the weights"""


def _set_rates(groups: Sequence[dict[str, Any]], lr_factor: float) -> None:
    for group in groups:
        group["lr"] = group["peak_lr"] * lr_factor


def set_momentum(groups: Sequence[dict[str, Any]], change: Callable[[float], float]) -> None:
    """Set `momentum`, or the first of `betas`, of parameter groups to a function of its value."""
    for group in groups:
        key = "momentum" if "momentum" in group else "betas"
        own = group.setdefault("peak_momentum", group[key] if key == "momentum" else group[key][0])
        value = change(own)
        group[key] = value if key == "momentum" else (value, *group[key][1:])


def clip_elements(gradients: Sequence[Tensor | None], limit: float) -> None:
    """Clamp each element of this rank's gradients to [-limit, limit] in place; 0 does nothing."""
    parts = [local(gradient) for gradient in gradients if gradient is not None]
    if limit and parts:
        foreach_clamp_min_(parts, -limit)
        foreach_clamp_max_(parts, limit)


def global_norm(
    gradients: Sequence[tuple[Tensor, Tensor]], num_holders: int, device: torch.device
) -> Tensor:
    """Return the L2 norm of gradients over all ranks.

    Args:
        gradients: each gradient, split over ranks in any way, and the part that this rank holds.
        num_holders: number of ranks that hold the same gradients, whole or in parts.
        device: where collectives run; offloaded gradients are elsewhere.
    """
    parts = [part for _, part in gradients]
    # torch would compute the norms of parts in bf16 in bf16.
    is_narrow = any(part.dtype is torch.bfloat16 for part in parts)
    if num_holders == 1 and not dist.is_initialized() and not is_narrow:
        return torch.nn.utils.get_total_norm(parts, foreach=True)
    by_count: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, part in gradients:
        by_count[num_parts(gradient)].append(part)
    # A gradient in `count` parts is held `num_holders / count` times over: it counts once.
    squares = [
        torch.stack(foreach_norm(tensors, dtype=norm_dtype(tensors))).square().sum()
        * (count / num_holders)
        for count, tensors in by_count.items()
    ]
    # A rank without gradients has to take part in the sum.
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    total = total.to(device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()
