"""Expert parallelism: each rank holds some of the experts, and an all-to-all sends every token to
the ranks of its experts (GShard, arXiv:2006.16668).

The ranks of a pipeline stage form a mesh of their own for experts. Its `expert` axis divides the
experts of a layer, its `expert_tensor` axis divides the width of each expert, and the other axes
shard or replicate the result as FSDP does with other parameters. All of these ranks see different
tokens: along the tensor axis, a mixture of experts computes its rank's part of the sequence.

A token travels in two steps: an all-to-all over the expert axis, to the rank with the same
coordinate on `expert_tensor`, and an all-gather over `expert_tensor`. Each of those ranks computes
with a slice of the expert's width, and a reduce-scatter sums their outputs on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ...kernels.all_to_all.exchange import Exchange
from ...model_zoo.layers.experts import TokenExchange
from ...model_zoo.layers.moe import moe_layers
from ...model_zoo.matrices import is_adapter
from .axis import LocalRank
from .collectives import (
    RowExchange,
    Splits,
    all_gather_rows,
    all_reduce_no_grad,
    reduce_scatter_rows,
    send_rows,
    start_all_to_all,
    wait,
    wait_for_rows,
)
from .mesh import EXPERT_AXES, Degrees, expert_grid
from .on_device import OnDeviceExchange, require_device
from .tensor.local_views import distribute_parameter, placement


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    local: LocalRank,
    split_dims: Mapping[str, Mapping[str, int | None]],
) -> list[nn.Module]:
    """Distribute the experts of a model over an expert mesh, in place, and return their modules.

    Args:
        model: the model on the meta device.
        mesh: the mesh that `build_expert_mesh` returned.
        local: this rank.
        split_dims: for each parameter name, the tensor dimension that each mesh axis splits.
    """
    # FSDP averages gradients over the ranks that hold the same experts, but the loss was scaled for
    # an average over all data-parallel and context ranks.
    gradient_factor = local.degrees.tensor / local.degrees.expert_ranks
    expert_group, tensor_group = map(mesh.get_group, EXPERT_AXES)
    layers = moe_layers(model)
    exchanges: dict[Any, Exchange] = {}  # layers take turns with the same buffers
    for path, layer in layers.items():
        for key in list(layer.experts._parameters):
            dims = [split_dims[f"{path}.experts.{key}"][axis] for axis in EXPERT_AXES]
            is_whole = dims[1] is None and local.degrees.expert_tensor > 1
            # A bias that every rank of the expert-tensor group holds whole would be added to a
            # token once per rank. A whole matrix of an adapter multiplies before or after one that
            # is split: each rank has a part of the outputs, and of the gradient.
            is_partial = is_whole and is_adapter(key)
            factor = 1 / local.degrees.expert_tensor if is_whole and not is_partial else 1.0
            view = ScaledView(factor, gradient_factor, tensor_group if is_partial else None)
            placements = list(map(placement, dims))
            distribute_parameter(layer.experts, key, mesh[EXPERT_AXES], placements, view)
        if local.table.expert_exchange == "on_device":
            if not local.is_simulated:
                require_device(local.device)
            capacity = layer.settings.capacity_factor
            layer.experts.exchange = OnDeviceExchange(
                expert_group, layer.permute, capacity, local.is_simulated, exchanges
            )
        else:
            layer.experts.exchange = AllToAllExchange(
                expert_group, tensor_group, layer.permute, local.is_simulated
            )
    return [layer.experts for layer in layers.values()]


@dataclass(frozen=True)
class AllToAllExchange(TokenExchange):
    """Sends tokens to the ranks that hold their experts, and the outputs back.

    Attributes:
        expert_group: process group over which the experts of the layer are divided.
        expert_tensor_group: process group over which the width of each expert is divided.
        permutation: the kernel that sorts tokens by expert.
        is_balanced: assume that all experts have the same load, as simulations do, which cannot
            read tensors.
    """

    expert_group: ProcessGroup
    expert_tensor_group: ProcessGroup
    permutation: Any
    is_balanced: bool = False

    def dispatch(self, rows: Tensor, weight: Tensor, offs: Tensor) -> tuple[Any, ...]:
        """Start sending tokens to the ranks of their experts; return the arguments of `compute`.

        Args:
            rows: token activations sorted by expert, [T, D].
            weight: the router's weight of each token, [T].
            offs: exclusive end of each expert's tokens in `rows`, int32 [E].
        """
        # Receivers need the counts before the tokens: the sizes of the all-to-all follow from them.
        ranks, slices = self.expert_group.size(), self.expert_tensor_group.size()
        counts = torch.diff(offs, prepend=offs.new_zeros(1))
        even = [len(counts) // ranks] * ranks
        pending = start_all_to_all(counts, Splits(even, even), self.expert_group)
        arriving = wait(pending).view(ranks, -1)
        # Each rank of this group later gets the tokens of all of them, and needs their counts too.
        arriving = all_gather_rows(arriving, [ranks] * slices, self.expert_tensor_group)
        sums = arriving.view(slices, ranks, -1).sum(2)
        own_sums = counts.view(ranks, -1).sum(1)
        if self.is_balanced:
            sent, *received = balanced_counts(ranks, slices, len(rows))
        else:
            # The splits must be Python numbers. This waits for the device, once for all counts.
            sent, *received = torch.cat([own_sums.unsqueeze(0), sums]).tolist()
        splits = Splits(sent, received[dist.get_rank(self.expert_tensor_group)])
        total, exchanges = sum(sent), []
        # The router's weights go along, because experts multiply by them before the last product.
        # Rows from `total` on were dropped or are padding.
        for x in (rows, weight):
            exchange = RowExchange(splits, self.expert_group)
            exchanges.append((send_rows(x[:total], exchange), exchange))
        return *exchanges, arriving, list(map(sum, received)), len(rows)

    def compute(self, experts: Callable[[Tensor, Tensor, Tensor], Tensor], *sent: Any) -> Tensor:
        """Wait for the tokens, compute this rank's experts and send the outputs back, [T, D].

        Args:
            experts: computes rows, weights and offsets as `Experts.compute`.
            sent: what `dispatch` returned: the pending exchanges of activations and of the router's
                weights, the number of tokens from each rank for each local expert
                [expert-tensor ranks x expert ranks, local experts], the number of tokens that each
                rank of the expert-tensor group received, and T.
        """
        rows, weight, arriving, received, count = sent
        rows_here, weight_here = (
            all_gather_rows(wait_for_rows(*exchange), received, self.expert_tensor_group)
            for exchange in (rows, weight)
        )
        # Rows arrive by sender and then by expert; the grouped matmul needs them by expert alone.
        # `output_size` spares waiting for the device to learn the number of rows.
        numbers = torch.arange(arriving.shape[1], device=arriving.device).repeat(len(arriving))
        chosen = numbers.repeat_interleave(arriving.flatten(), output_size=len(rows_here))
        plan = self.permutation.plan(chosen.unsqueeze(1), arriving.shape[1])
        sorted_rows = self.permutation.gather(rows_here, plan)
        sorted_weight = self.permutation.gather(weight_here.unsqueeze(1), plan).squeeze(1)
        partial_outputs = experts(sorted_rows, sorted_weight, plan.offs)
        outputs = reduce_scatter_rows(
            self.permutation.combine(partial_outputs, plan), received, self.expert_tensor_group
        )
        # Back along the same splits. Partial outputs are summed before, so that they travel once.
        back = RowExchange(rows[1].splits.reversed(), self.expert_group)
        own_outputs = wait_for_rows(send_rows(outputs, back), back)
        # Tokens that were dropped because an expert is full get zeros.
        return F.pad(own_outputs, (0, 0, 0, count - len(own_outputs)))


def balanced_counts(ranks: int, slices: int, rows: int) -> list[list[int]]:
    """Return the rows that a rank sends and receives if all experts have the same load.

    Args:
        ranks: number of ranks of the expert group.
        slices: number of ranks of the expert-tensor group.
        rows: number of this rank's rows.

    Returns:
        the rows sent to each rank of the expert group, then for each rank of the expert-tensor
        group the rows that it receives from each.
    """
    share, more = divmod(rows, ranks)
    return [[share + (rank < more) for rank in range(ranks)]] * (1 + slices)


def build_expert_mesh(degrees: Degrees, device_type: str, *, sharded: bool) -> DeviceMesh:
    """Return the mesh on which experts are placed; all ranks call it."""
    # The expert axes are the innermost: their all-to-all stays between neighbouring ranks.
    replicate, shard = expert_grid(degrees, sharded=sharded)
    return init_device_mesh(
        device_type,
        (degrees.pipeline, replicate, shard, degrees.expert, degrees.expert_tensor),
        mesh_dim_names=("pipeline", "replicate", "shard", *EXPERT_AXES),
    )


@dataclass(frozen=True)
class ScaledView:
    """Maps a parameter to this rank's shard, scaled by one factor forward and another backward.

    Attributes:
        factor: multiplies the value in the forward pass.
        gradient_factor: multiplies the gradient in the backward pass.
        gradient_group: process group over which gradients are summed, or None.
    """

    factor: float
    gradient_factor: float
    gradient_group: ProcessGroup | None = None

    def __call__(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the experts compute with."""
        shard = cast("DTensor", parameter).to_local()
        if self.factor == self.gradient_factor == 1 and self.gradient_group is None:
            return shard
        return cast("Tensor", _Scale.apply(shard, self))  # type: ignore[no-untyped-call]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: ScaledView) -> Tensor:
        ctx.view = view
        return x.view_as(x) if view.factor == 1 else x * view.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad, group = grad * ctx.view.gradient_factor, ctx.view.gradient_group
        return grad if group is None else all_reduce_no_grad(grad, group), None
