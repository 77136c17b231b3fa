"""Expert parallelism: ranks hold some of the experts each, and send each other the rows for them
(GShard, arXiv:2006.16668).

The ranks of a stage of the pipeline lie in a grid of their own for experts: `expert` of them share
the experts of a layer, `expert_tensor` neighbours share each of these experts, and what is left
shards or replicates each share, as FSDP does with other weights. All of these ranks see different
tokens: along the tensor axis, a mixture works on its rank's part of the sequence.

A row goes to the ranks of its expert in two steps: to the one that is as far along `expert_tensor`
as the row's own rank, and from there to that one's neighbours. Each of them computes with a piece
of the expert's width, and what they make of a row is summed on the way back.
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
from .tensor.weights import lay_out, placement, view

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .mesh import Degrees


def share_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    degrees: Degrees,
    placed: Mapping[str, Mapping[str, int | None]],
) -> list[nn.Module]:
    """Let ranks hold parts of the experts, in place, and return their modules.

    Args:
        model: still on `meta`.
        mesh: see `build_expert_mesh`.
        degrees: of all axes.
        placed: parameter name -> axis -> the dim that it cuts.
    """
    # FSDP averages over the ranks that hold the same parts, and the loss is scaled for an average
    # over all copies.
    factor = degrees.tensor / degrees.expert_ranks
    found: list[nn.Module] = []
    for path, layer in moe_layers(model).items():
        experts, factors = layer.experts, {}
        for key in list(experts._parameters):
            dims = [placed[f"{path}.experts.{key}"][axis] for axis in EXPERT_AXES]
            lay_out(experts, key, mesh[EXPERT_AXES], list(map(placement, dims)))
            # What neighbours hold alike, each adds to its own part of a row's sum.
            factors[key] = 1.0 if dims[1] is not None else 1 / degrees.expert_tensor, factor
        kind = cast("Hashable", type(experts))
        experts.__class__ = _shared(kind, frozenset(experts._parameters))
        shared = cast(_SharedExperts, experts)
        shared.group, shared.neighbours = map(mesh.get_group, EXPERT_AXES)
        shared.factors, shared.permutation = factors, layer.permute
        found.append(experts)
    return found


@cache
def _shared(base: Any, keys: frozenset[str]) -> Any:
    """Return the class of experts that others hold too; one for all layers of a kind."""
    views = {key: view(_SharedExperts.view_of, key) for key in keys}
    return type(base.__name__, (_SharedExperts, base), views)


class _SharedExperts:
    """Computes rows of all experts, of which this rank holds some."""

    group: ProcessGroup
    """with which it shares the experts of the layer"""
    neighbours: ProcessGroup
    """with which it shares each of its own"""
    factors: dict[str, tuple[float, float]]
    """of each parameter where it is used, and of what is then its gradient"""
    permutation: Any

    def view_of(self, key: str) -> Tensor:
        """Return this rank's part of a parameter."""
        parameter = cast(nn.Module, self)._parameters[key]
        placed = cast(DTensor, parameter)
        # Outside of a forward pass FSDP asks for what it has sharded, over a mesh of more axes.
        if placed.device_mesh.ndim > len(EXPERT_AXES):
            return placed
        return _scaled(placed.to_local(), *self.factors[key])

    def begin(self, rows: Tensor, weight: Tensor, offs: Tensor) -> tuple[Any, ...]:
        """Send rows to the ranks of their experts, and return without waiting for those that come.

        What is computed before `forward` takes as long as they travel, and its gradients as long
        as theirs.
        """
        ranks, neighbours = self.group.size(), self.neighbours.size()
        leaving = torch.diff(offs, prepend=offs.new_zeros(1))
        even = [len(leaving) // ranks] * ranks
        coming = _wait(_start(leaving, Splits(even, even), self.group)).view(ranks, -1)
        coming = shown(coming, [ranks] * neighbours, self.neighbours)
        mine = coming.view(neighbours, ranks, -1)
        counts = row_counts(leaving.view(ranks, -1).sum(1), mine.sum(2), len(rows))
        place, (sent, *received) = dist.get_rank(self.neighbours), counts
        total, under_way = sum(sent), []
        for x in (rows, weight):
            sending = Sending(Splits(sent, received[place]), self.group)
            under_way.append((send(x[:total], sending), sending))
        return *under_way, coming, list(map(sum, received)), len(rows)

    def forward(
        self,
        rows: tuple[Tensor, Sending],
        weight: tuple[Tensor, Sending],
        coming: Tensor,
        received: list[int],
        count: int,
    ) -> Tensor:
        """Do what the experts' own `forward` does, wherever they are.

        Args:
            rows: under way.
            weight: of each; under way.
            coming: int [ranks, experts here], how many rows come from each rank for each expert,
                by way of each neighbour.
            received: how many come to each neighbour.
            count: of this rank's own rows, with those that are for no expert.
        """
        there, there_weight = (
            shown(arrived(*each), received, self.neighbours) for each in (rows, weight)
        )
        experts = torch.arange(coming.shape[1], device=coming.device).repeat(len(coming))
        chosen = experts.repeat_interleave(coming.flatten(), output_size=len(there))
        plan = self.permutation.plan(chosen.unsqueeze(1), coming.shape[1])
        sorted_rows = self.permutation.gather(there, plan)
        sorted_weight = self.permutation.gather(there_weight.unsqueeze(1), plan).squeeze(1)
        made = super().forward(sorted_rows, sorted_weight, plan.offs)  # type: ignore[misc]
        whole = joined(self.permutation.combine(made, plan), received, self.neighbours)
        back = Sending(rows[1].splits.turned(), self.group)
        mine = arrived(send(whole, back), back)
        return F.pad(mine, (0, 0, 0, count - len(mine)))


class Splits(NamedTuple):
    """How many rows go to each of some ranks, and how many come from each."""

    sent: list[int]
    received: list[int]

    def turned(self) -> Splits:
        """Return those of the way back."""
        return Splits(self.received, self.sent)


@dataclass
class Sending:
    """Rows between ranks."""

    splits: Splits
    group: ProcessGroup
    gradient: Tensor | None = None
    """what is under way back"""


def row_counts(sent: Tensor, received: Tensor, rows: int) -> list[list[int]]:
    """Return how many rows go to each rank, and come to each neighbour; the host waits for it.

    Args:
        sent: int [ranks].
        received: int [neighbours, ranks].
        rows: of this rank, for who cannot look into tensors.
    """
    del rows
    counts: list[list[int]] = torch.cat([sent.unsqueeze(0), received]).tolist()
    return counts


def balanced_counts(sent: Tensor, received: Tensor, rows: int) -> list[list[int]]:
    """Return what `row_counts` would if all experts had the same load."""
    each, more = divmod(rows, len(sent))
    counts = [each + (rank < more) for rank in range(len(sent))]
    return [counts] * (1 + len(received))


def shown(x: Tensor, lengths: list[int], group: ProcessGroup) -> Tensor:
    """Return the rows of all ranks of a group; gradients are summed.

    Args:
        x: [rows, ...] of this rank.
        lengths: of each rank's rows.
        group: the ranks.
    """
    ranks = group.size()
    if ranks == 1:
        return x
    sending = Sending(Splits([len(x)] * ranks, lengths), group)
    return arrived(send(x.expand(ranks, *x.shape).flatten(0, 1), sending), sending)


def joined(x: Tensor, lengths: list[int], group: ProcessGroup) -> Tensor:
    """Return the sum of what all ranks of a group made of this rank's rows.

    Args:
        x: [rows of all ranks, ...], what this rank made.
        lengths: of each rank's rows.
        group: the ranks.
    """
    ranks, mine = group.size(), lengths[dist.get_rank(group)]
    if ranks == 1:
        return x
    sending = Sending(Splits(lengths, [mine] * ranks), group)
    return arrived(send(x, sending), sending).view(ranks, mine, *x.shape[1:]).sum(0)


def send(x: Tensor, sending: Sending) -> Tensor:
    """Return a tensor for the rows that all ranks send to this one: for `arrived`, nothing else.

    Args:
        x: [rows, ...], those for each rank together.
        sending: of these rows alone.
    """
    return cast(Tensor, _Sent.apply(x, sending))  # type: ignore[no-untyped-call]


def arrived(x: Tensor, sending: Sending) -> Tensor:
    """Wait for what `send` returned for the same `sending`."""
    return cast(Tensor, _Arrived.apply(x, sending))  # type: ignore[no-untyped-call]


def _start(x: Tensor, splits: Splits, group: ProcessGroup) -> Tensor:
    exchange = torch.ops._c10d_functional.all_to_all_single
    return cast(Tensor, exchange(x.contiguous(), splits.received, splits.sent, group.group_name))


def _wait(x: Tensor) -> Tensor:
    return cast(Tensor, torch.ops._c10d_functional.wait_tensor(x))


class _Sent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sending: Sending) -> Tensor:
        ctx.sending = sending
        return _start(x, sending.splits, sending.group)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        sending = ctx.sending
        gradient, sending.gradient = sending.gradient, None  # others hold `sending` for longer
        return _wait(gradient), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sending: Sending) -> Tensor:
        ctx.sending = sending
        return _wait(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sending = ctx.sending
        sending.gradient = _start(grad, sending.splits.turned(), sending.group)
        return grad, None


def _scaled(weight: Tensor, used: float, gradient: float) -> Tensor:
    if used == gradient == 1:
        return weight
    return cast(Tensor, _Scaled.apply(weight, used, gradient))  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, used: float, gradient: float) -> Tensor:
        ctx.factor = gradient
        return x.view_as(x) if used == 1 else x * used

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.factor, None, None
