"""Context parallelism: each sequence is split over ranks.

Rank r of C holds pieces r and 2C - 1 - r of the 2C pieces of a sequence, so that causal attention
is the same work on every rank. Keys and values are all-gathered (Grattafiori et al. 2024,
arXiv:2407.21783, section 3.3.2), or passed around in a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from ....kernels.attention.local import Mask
from ....kernels.attention.varlen import Documents
from ....kernels.choose import Kernels
from ....kernels.sequence import SequenceShard
from ....model_zoo.base import Model
from ....model_zoo.config import ModelConfig
from ....model_zoo.layers.moe import moe_layers
from ...data.batch import Batch
from ..axis import AxisParts, LocalParts, LocalRank, SplitSettings
from ..collectives import all_gather, all_gather_no_grad, all_reduce_no_grad
from ..mesh import AXES
from .ring import ring_attention, ring_largest_scores

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class SplitSequence(SequenceShard):
    """A rank's positions of sequences that a process group shares.

    Attributes:
        ranks: number of ranks of the group.
        rank: this rank's number in the group.
        group: process group of the context axis.
    """

    group: ProcessGroup | None = None

    def sum_(self, x: Tensor) -> Tensor:
        """Replace values by their sum over the group, in place, and return them."""
        dist.all_reduce(x, group=self.group)
        return x


@dataclass(frozen=True)
class ContextParallel(AxisParts):
    """Splits sequences over the ranks of the context axis.

    Attributes:
        group: process group of the context axis.
        rank: this rank's number in the group.
        ranks: number of ranks of the group, C; the sequence length is a multiple of 2C.
        in_ring: whether keys and values are passed around in a ring instead of being all-gathered.
    """

    group: ProcessGroup
    rank: int
    ranks: int
    in_ring: bool = False

    @property
    def pieces(self) -> tuple[int, int]:
        """The numbers of the two pieces of a sequence that this rank holds."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def take(self, batch: Batch) -> Batch:
        """Return the positions of each sequence that this rank computes, [B, S / C]."""
        return batch.split_sequence(lambda whole: torch.cat(self._mine(whole), dim=1))

    def adapt_kernels(self, kernels: Kernels, config: ModelConfig) -> Kernels:
        """Return kernels whose attention sees the keys and values of all ranks."""
        kernels = replace(kernels, sequence=SplitSequence(self.ranks, self.rank, self.group))
        if self.in_ring:
            return replace(
                kernels,
                attention=partial(
                    ring_attention, kernel=kernels.partial_attention, group=self.group
                ),
                largest_scores=partial(ring_largest_scores, group=self.group),
                attention_mask=self._documents,
            )
        return replace(
            kernels,
            attention=partial(self._attend, kernels.attention),
            largest_scores=partial(self._attend, kernels.largest_scores),
            attention_mask=partial(self._mask, kernels.attention_mask),
        )

    def split(
        self,
        model: Model,
        config: ModelConfig,
        parts: LocalParts,
        settings: SplitSettings,
    ) -> LocalParts:
        """Let routers count the chosen experts of whole sequences; parameters are not split."""
        model.own_positions = lambda whole: torch.cat(self._mine(whole), dim=1)
        model.shift = partial(self._shift, model.shift)
        for layer in moe_layers(model).values():
            layer.router.sum_of_sequence = partial(all_reduce_no_grad, group=self.group)
        return parts

    def _mine(self, x: Tensor, dim: int = 1) -> list[Tensor]:
        pieces = x.chunk(2 * self.ranks, dim)
        return [pieces[number] for number in self.pieces]

    def _shift(
        self,
        base: Callable[..., Tensor],
        x: Tensor,
        count: int,
        fill: int,
        document_ids: Tensor | None,
    ) -> Tensor:
        """Return what `base` does with the values [B, S] of all ranks, at this rank's positions."""
        # A later position may be in any rank's pieces. Numbers, and not hidden states, travel.
        whole = self._in_order(all_gather_no_grad(x, 1, self.group))
        return torch.cat(self._mine(base(whole, count, fill, document_ids)), dim=1)

    def _documents(
        self, _queries: Tensor, keys: Tensor, *, max_documents: int | None = None
    ) -> Tensor:
        """Return each rank's part of the document ids of whole sequences, [B, C, S / C]."""
        pieces = keys.view(len(keys), 2 * self.ranks, -1)
        first, second = pieces.chunk(2, dim=1)
        return torch.cat([first, second.flip(1)], dim=2)

    def _mask(
        self,
        base: Callable[..., Any],
        queries: Tensor,
        keys: Tensor,
        *,
        causal: bool = True,
        **bound: Any,
    ) -> Mask:
        """Return what this rank's queries see, from ids of whole sequences.

        For causal attention that is a mask, or documents, for each piece, with the keys up to the
        end of the piece; else a mask [B, 1, S / C, S].
        """
        if not causal:
            return torch.cat(self._mine(base(queries, keys, causal=False), dim=2), dim=2)
        length = queries.shape[1] // (2 * self.ranks)
        ends = [(number + 1) * length for number in self.pieces]
        return tuple(
            base(piece, keys[:, :end], **bound)
            for piece, end in zip(self._mine(queries), ends, strict=True)
        )

    def _attend(
        self,
        base: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: tuple[Tensor | Documents, ...] | Tensor | None = None,
        **reach: Any,
    ) -> Tensor:
        """Attend from this rank's queries, [B, S / C, H, K], to the keys of the whole sequence."""
        # One all-gather for both, because its latency counts. Its backward pass, a reduce-scatter,
        # sums the gradients that queries of all ranks give to a key.
        found = all_gather(torch.cat([key, value], -1), 1, self.group)
        widths = [key.shape[-1], value.shape[-1]]
        key, value = map(self._in_order, torch.split(found, widths, -1))
        if not reach.get("causal", True):
            return base(query, key, value, mask, **reach)
        length = query.shape[1] // 2
        masks = (None, None) if mask is None else mask
        outs = []
        for number, part, seen in zip(
            self.pieces, torch.split(query, length, 1), masks, strict=True
        ):
            # Causal attention: later keys are left out, which saves the work of masking them.
            end = (number + 1) * length
            outs.append(base(part, key[:, :end], value[:, :end], seen, **reach))
        return torch.cat(outs, dim=1)

    def _in_order(self, found: Tensor) -> Tensor:
        """Return [B, S, G, K] in the order of the sequence, from the order of ranks."""
        # Rank by rank the pieces are 0, 2C - 1, 1, 2C - 2, ...
        pieces = found.chunk(2 * self.ranks, dim=1)
        return torch.cat([*pieces[::2], *pieces[::-2]], dim=1)


def make_axis(local: LocalRank) -> ContextParallel:
    """Return what the context axis does on this rank; all ranks call it."""
    # The mesh of parameters has no context axis: there these ranks belong to "shard", or to
    # "replicate" where nothing is sharded.
    degrees, index = local.degrees, AXES.index("context")
    outer, inner = degrees.product(AXES[:index]), degrees.product(AXES[index + 1 :])
    mesh = init_device_mesh(
        local.device.type,
        (outer, degrees.context, inner),
        mesh_dim_names=("outer", "context", "inner"),
    )
    place, in_ring = degrees.coordinate(local.rank).context, local.table.context_exchange == "ring"
    return ContextParallel(mesh.get_group("context"), place, degrees.context, in_ring)
