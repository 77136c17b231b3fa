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

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...model_zoo.layers.moe import moe_layers
from .mesh import EXPERT_AXES
from .tensor.local_views import distribute_parameter, placement, property_from

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .mesh import Degrees


def shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    degrees: Degrees,
    placed: Mapping[str, Mapping[str, int | None]],
) -> list[nn.Module]:
    """Distribute the experts of a model over an expert mesh, in place, and return their modules.

    Args:
        model: the model on the meta device.
        mesh: the mesh that `build_expert_mesh` returned.
        degrees: sizes of all axes.
        placed: for each parameter name, the tensor dimension that each mesh axis splits.
    """
    # FSDP averages gradients over the ranks that hold the same experts, but the loss was scaled for
    # an average over all data-parallel and context ranks.
    factor = degrees.tensor / degrees.expert_ranks
    found: list[nn.Module] = []
    for path, layer in moe_layers(model).items():
        experts, factors = layer.experts, {}
        for key in list(experts._parameters):
            dims = [placed[f"{path}.experts.{key}"][axis] for axis in EXPERT_AXES]
            distribute_parameter(experts, key, mesh[EXPERT_AXES], list(map(placement, dims)))
            # A parameter that every rank of the expert-tensor group holds whole (a bias) would be
            # added to a token once per rank.
            factors[key] = 1.0 if dims[1] is not None else 1 / degrees.expert_tensor, factor
        kind = cast("Hashable", type(experts))
        experts.__class__ = _shared(kind, frozenset(experts._parameters))
        shared = cast("_DistributedExperts", experts)
        shared.expert_group, shared.expert_tensor_group = map(mesh.get_group, EXPERT_AXES)
        shared.factors, shared.permutation = factors, layer.permute
        found.append(experts)
    return found


@cache
def _shared(base: Any, keys: frozenset[str]) -> Any:
    """Return the class of distributed experts. One class serves all layers of a kind, so that
    compiled blocks share their code."""
    views = {key: property_from(_DistributedExperts.view_of, key) for key in keys}
    return type(base.__name__, (_DistributedExperts, base), views)


class _DistributedExperts:
    """Experts that are divided over ranks: tokens are sent to the ranks that hold their experts."""

    expert_group: ProcessGroup
    """process group over which the experts of this layer are divided"""
    expert_tensor_group: ProcessGroup
    """process group over which the width of each expert is divided"""
    factors: dict[str, tuple[float, float]]
    """for each parameter name, the factors of its value in the forward pass and of its gradient"""
    permutation: Any

    def view_of(self, key: str) -> Tensor:
        """Return this rank's shard of a parameter as a plain tensor."""
        parameter = cast("nn.Module", self)._parameters[key]
        placed = cast("DTensor", parameter)
        # Outside of a forward pass FSDP asks for what it has sharded, over a mesh of more axes.
        if placed.device_mesh.ndim > len(EXPERT_AXES):
            return placed
        return _scaled(placed.to_local(), *self.factors[key])

    def dispatch(self, rows: Tensor, weight: Tensor, offs: Tensor) -> tuple[Any, ...]:
        """Start sending tokens to the ranks of their experts; return the arguments of `forward`.

        Work issued between `dispatch` and `forward`, such as the shared expert, overlaps with the
        exchange, in the backward pass too.

        Args:
            rows: token activations sorted by expert, [T, D].
            weight: the router's weight of each token, [T].
            offs: exclusive end of each expert's tokens in `rows`, int32 [E].
        """
        ranks, neighbours = self.expert_group.size(), self.expert_tensor_group.size()
        leaving = torch.diff(offs, prepend=offs.new_zeros(1))
        even = [len(leaving) // ranks] * ranks
        coming = _wait(_start(leaving, Splits(even, even), self.expert_group)).view(ranks, -1)
        coming = all_gather_rows(coming, [ranks] * neighbours, self.expert_tensor_group)
        mine = coming.view(neighbours, ranks, -1)
        counts = row_counts(leaving.view(ranks, -1).sum(1), mine.sum(2), len(rows))
        place, (sent, *received) = dist.get_rank(self.expert_tensor_group), counts
        total, under_way = sum(sent), []
        for x in (rows, weight):
            exchange = RowExchange(Splits(sent, received[place]), self.expert_group)
            under_way.append((send_rows(x[:total], exchange), exchange))
        return *under_way, coming, list(map(sum, received)), len(rows)

    def forward(
        self,
        rows: tuple[Tensor, RowExchange],
        weight: tuple[Tensor, RowExchange],
        coming: Tensor,
        received: list[int],
        count: int,
    ) -> Tensor:
        """Wait for the tokens, compute this rank's experts and send the outputs back, [count, D].

        Args:
            rows: the pending exchange of activations.
            weight: the pending exchange of the router's weights.
            coming: int [expert-tensor ranks x expert ranks, local experts], the number of tokens
                from each rank for each expert.
            received: the number of tokens that each rank of the expert-tensor group received.
            count: the number of this rank's tokens; those that were dropped get zeros.
        """
        there, there_weight = (
            all_gather_rows(wait_for_rows(*each), received, self.expert_tensor_group)
            for each in (rows, weight)
        )
        experts = torch.arange(coming.shape[1], device=coming.device).repeat(len(coming))
        chosen = experts.repeat_interleave(coming.flatten(), output_size=len(there))
        plan = self.permutation.plan(chosen.unsqueeze(1), coming.shape[1])
        sorted_rows = self.permutation.gather(there, plan)
        sorted_weight = self.permutation.gather(there_weight.unsqueeze(1), plan).squeeze(1)
        made = super().forward(sorted_rows, sorted_weight, plan.offs)  # type: ignore[misc]
        whole = reduce_scatter_rows(
            self.permutation.combine(made, plan), received, self.expert_tensor_group
        )
        back = RowExchange(rows[1].splits.reversed(), self.expert_group)
        mine = wait_for_rows(send_rows(whole, back), back)
        return F.pad(mine, (0, 0, 0, count - len(mine)))


class Splits(NamedTuple):
    """The numbers of rows that a rank sends to and receives from each rank of a group."""

    sent: list[int]
    received: list[int]

    def reversed(self) -> Splits:
        """Return the splits of the opposite direction."""
        return Splits(self.received, self.sent)


@dataclass
class RowExchange:
    """An all-to-all of rows, and its backward pass."""

    splits: Splits
    group: ProcessGroup
    gradient: Tensor | None = None
    """the pending all-to-all of the gradient, from `wait_for_rows` to `send_rows`"""


def row_counts(sent: Tensor, received: Tensor, rows: int) -> list[list[int]]:
    """Return the splits of the all-to-all as Python numbers, which synchronizes with the device.

    Args:
        sent: rows for each rank of the expert group, int [ranks].
        received: rows from each of them to each rank of the expert-tensor group,
            int [expert-tensor ranks, ranks].
        rows: number of this rank's rows; simulations, which cannot read tensors, use it.
    """
    del rows
    counts: list[list[int]] = torch.cat([sent.unsqueeze(0), received]).tolist()
    return counts


def balanced_counts(sent: Tensor, received: Tensor, rows: int) -> list[list[int]]:
    """Return what `row_counts` returns where all experts have the same load."""
    each, more = divmod(rows, len(sent))
    counts = [each + (rank < more) for rank in range(len(sent))]
    return [counts] * (1 + len(received))


def all_gather_rows(x: Tensor, lengths: list[int], group: ProcessGroup) -> Tensor:
    """Concatenate the rows of all ranks of a group; the backward pass sums gradients over ranks.

    Args:
        x: this rank's rows, [N, ...].
        lengths: the number of rows of each rank, which may differ.
        group: the process group.
    """
    ranks = group.size()
    if ranks == 1:
        return x
    exchange = RowExchange(Splits([len(x)] * ranks, lengths), group)
    return wait_for_rows(send_rows(x.expand(ranks, *x.shape).flatten(0, 1), exchange), exchange)


def reduce_scatter_rows(x: Tensor, lengths: list[int], group: ProcessGroup) -> Tensor:
    """Sum the outputs of all ranks of a group and return this rank's rows of the sum.

    Args:
        x: this rank's outputs for the rows of all ranks, [sum(lengths), ...].
        lengths: the number of rows of each rank.
        group: the process group.
    """
    ranks, mine = group.size(), lengths[dist.get_rank(group)]
    if ranks == 1:
        return x
    exchange = RowExchange(Splits(lengths, [mine] * ranks), group)
    return wait_for_rows(send_rows(x, exchange), exchange).view(ranks, mine, *x.shape[1:]).sum(0)


def send_rows(x: Tensor, exchange: RowExchange) -> Tensor:
    """Start an all-to-all and return its pending result, which only `wait_for_rows` may read.

    Args:
        x: rows sorted by the rank that they go to, [N, ...].
        exchange: the splits and the group; one object per call.
    """
    return cast("Tensor", _SendRows.apply(x, exchange))  # type: ignore[no-untyped-call]


def wait_for_rows(x: Tensor, exchange: RowExchange) -> Tensor:
    """Wait for the all-to-all that `send_rows` started with the same `exchange`."""
    return cast("Tensor", _WaitForRows.apply(x, exchange))  # type: ignore[no-untyped-call]


def _start(x: Tensor, splits: Splits, group: ProcessGroup) -> Tensor:
    exchange = torch.ops._c10d_functional.all_to_all_single
    return cast("Tensor", exchange(x.contiguous(), splits.received, splits.sent, group.group_name))


def _wait(x: Tensor) -> Tensor:
    return cast("Tensor", torch.ops._c10d_functional.wait_tensor(x))


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _start(x, exchange.splits, exchange.group)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        gradient, exchange.gradient = exchange.gradient, None  # others hold `exchange` for longer
        return _wait(gradient), None


class _WaitForRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return _wait(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.gradient = _start(grad, exchange.splits.reversed(), exchange.group)
        return grad, None


def _scaled(weight: Tensor, used: float, gradient: float) -> Tensor:
    if used == gradient == 1:
        return weight
    return cast("Tensor", _Scaled.apply(weight, used, gradient))  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, used: float, gradient: float) -> Tensor:
        ctx.factor = gradient
        return x.view_as(x) if used == 1 else x * used

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None
