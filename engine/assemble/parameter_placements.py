"""What optimizers of whole matrices need to know of each parameter under a plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...model_zoo.matrices import HeadRows
from ..optim.placement import DimSplit, ParameterPlacement
from ..parallel.axis import LocalRank
from ..parallel.mesh import Degrees, expert_grid
from ..parallel.placement import ShardPlacement


def place_parameters(
    found: Iterable[ShardPlacement],
    matrices: Collection[str],
    local: LocalRank,
    heads: Mapping[str, HeadRows],
    *,
    by_head: bool = False,
) -> dict[str, ParameterPlacement]:
    """Return the placement of each parameter among the ranks of this rank's pipeline stage.

    All ranks of the run call it, because it makes process groups.

    Args:
        found: where each parameter lies.
        matrices: names of the parameters that are matrices.
        local: this rank.
        heads: see `ModelConfig.attention_rows`.
        by_head: whether the rows of each head are matrices of their own.
    """
    degrees = local.degrees
    ranks, group = degrees.world // degrees.pipeline, _make_stage_group(degrees, local.rank)
    is_sharded = local.table.is_sharded(degrees)
    placed = {}
    for each in found:
        path = each.name.rpartition(".")[0]
        rows = next((rows for name, rows in heads.items() if path.endswith(f".{name}")), None)
        is_matrix = each.name in matrices
        # An adapter beside a projection has other rows, or is no projection of heads.
        is_whole = rows is not None and each.shape[0] == sum(rows.block_rows)
        placed[each.name] = ParameterPlacement(
            each.name,
            each.shape,
            is_matrix,
            _find_splits(each, degrees, is_sharded=is_sharded),
            ranks,
            local.rank % ranks,
            group,
            rows if is_whole else None,
            rows.block_rows if rows and is_whole and is_matrix and by_head else (),
        )
    return placed


def _find_splits(
    placed: ShardPlacement, degrees: Degrees, *, is_sharded: bool
) -> tuple[DimSplit, ...]:
    """Return the splits of a parameter in the order in which they are made: FSDP's comes last."""
    if "expert" in placed.place:
        inner = {"expert": degrees.expert, "expert_tensor": degrees.expert_tensor}
        inner_strides = {"expert": degrees.expert_tensor, "expert_tensor": 1}
        shards = expert_grid(degrees, sharded=is_sharded)[1]
        shard_stride = degrees.expert_ranks
    else:
        inner, inner_strides = {"tensor": degrees.tensor}, {"tensor": 1}
        shards, shard_stride = degrees.fsdp, degrees.tensor
    sizes, strides = {**inner, "shard": shards}, {**inner_strides, "shard": shard_stride}
    splits = []
    for axis, ranks in sizes.items():
        dim = placed.place.get(axis)
        if dim is not None and ranks > 1:
            splits.append(DimSplit(dim, ranks, strides[axis]))
    return tuple(splits)


def _make_stage_group(degrees: Degrees, rank: int) -> ProcessGroup | None:
    """Return the process group of the ranks that hold the same blocks; None: this rank alone."""
    ranks = degrees.world // degrees.pipeline
    if ranks == 1:
        return None
    if degrees.pipeline == 1:
        return dist.group.WORLD
    # Every rank has to take part in making the groups of all stages.
    groups = [
        dist.new_group(list(range(first, first + ranks)))
        for first in range(0, degrees.world, ranks)
    ]
    return cast("ProcessGroup", groups[rank // ranks])
