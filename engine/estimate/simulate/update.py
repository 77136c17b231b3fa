"""Counts what an optimizer of whole matrices does in a step, without the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ....kernels.torch_private import FakeTensorMode
from ....model_zoo.config import ModelConfig
from ....model_zoo.matrices import maps_hidden_states
from ...assemble.parameter_placements import place_parameters
from ...optim.parameters import parameter_groups
from ...optim.placement import ParameterPlacement
from ...optim.tables import OptimizerConfig
from ...parallel.axis import LocalRank
from ...parallel.mesh import Degrees
from ...parallel.pipeline.cut import cut_blocks
from ...parallel.placement import ShardPlacement
from ...parallel.tables import Parallel
from .build import CPU
from .collectives import CollectiveMatcher
from .count import StepCounter, StepCounts, bytes_of_state
from .torch_internals import fake_process_group


def count_update(
    optimizer_config: OptimizerConfig,
    config: ModelConfig,
    table: Parallel,
    found: Iterable[ShardPlacement],
    degrees: Degrees,
    rank: int,
) -> StepCounts:
    """Return the counts of a rank's optimizer step, with all of its matrices.

    The matrices of a step are divided among ranks, so that a rank's share is not linear in the
    number of blocks. The optimizer is the one that trains; its tensors have shapes alone.

    Args:
        optimizer_config: the recipe's `[optimizer]`; its groups do not matter.
        config: the model's config.
        table: the recipe's `[parallel]`.
        found: where each parameter of the model lies.
        degrees: the size of each mesh axis.
        rank: the rank.
    """
    optimizer_config = optimizer_config.model_copy(update={"groups": []})
    prefixes = _held_prefixes(table, config, degrees, rank)
    found = [each for each in found if prefixes is None or each.name.startswith(prefixes)]
    matrices = [
        each.name for each in found if maps_hidden_states(each.name, each.shape, config.layout)
    ]
    counter = StepCounter(CollectiveMatcher(degrees, rank))
    counter.matcher.in_update = True
    with fake_process_group(rank, degrees.world):
        at = LocalRank(table, degrees, rank, CPU, None, is_simulated=True)
        by_head = optimizer_config.updates_heads
        placed = place_parameters(found, matrices, at, config.attention_rows(), by_head=by_head)
        with FakeTensorMode(allow_non_fake_inputs=True):
            weights = []
            for name, each in placed.items():
                sizes = [end - first for first, end in each.part(each.rank)]
                weight = torch.nn.Parameter(torch.empty(sizes))
                weight.grad = torch.empty(sizes)
                weights.append((name, weight))
            groups = parameter_groups(weights, optimizer_config, placements=placed)
            if optimizer_config.bounds_scores:
                groups = [{**group, "scores": _scores_of(placed)} for group in groups]
            optimizer = optimizer_config.build(groups, CPU)
            optimizer.step()  # it makes the state, which may be other work than later steps
            with counter:
                optimizer.step()
            counter.counts.held["optimizer"] = bytes_of_state(optimizer)
    return counter.counts


def _scores_of(placed: Mapping[str, ParameterPlacement]) -> dict[str, torch.Tensor]:
    """Return numbers for the largest scores of all heads, by the path of the attention."""
    heads: dict[str, int] = {}
    for name, each in placed.items():
        if each.heads:
            path = name.rsplit(".", 2)[0]
            heads[path] = max(heads.get(path, 0), each.heads.heads)
    return {path: torch.zeros(number) for path, number in heads.items()}


def _held_prefixes(
    table: Parallel, config: ModelConfig, degrees: Degrees, rank: int
) -> tuple[str, ...] | None:
    """Return how the names of the parameters begin that a rank's stages hold; None: all are."""
    if degrees.pipeline == 1:
        return None
    layout, place = config.layout, degrees.coordinate(rank).pipeline
    cut = cut_blocks(table.pipelining, degrees.pipeline, config)
    prefixes = list[str]()
    for stage in cut.stages_of(place):
        prefixes += [f"{layout.blocks}.{number}." for number in cut.held_blocks(stage)]
        prefixes += [f"{layout.embed}."] * cut.has_embedding(stage)
        prefixes += [f"{layout.head}."] * (stage == cut.stages - 1)
    return tuple(prefixes)
