"""Counts what an optimizer of whole matrices does in a step, without the model."""

from __future__ import annotations

import torch

from ....kernels.torch_private import FakeTensorMode
from ....model_zoo.config import ModelConfig
from ....model_zoo.matrices import maps_hidden_states
from ...optim.parameters import parameter_groups
from ...parallel.axis import LocalRank
from ...parallel.mesh import Degrees
from ...parallel.parameter_placements import place_parameters
from ...parallel.pipeline.cut import cut_blocks
from ...recipe.placements import placements
from ...recipe.schema import Recipe
from .build import CPU
from .collectives import CollectiveMatcher
from .count import StepCounter, StepCounts, bytes_of_state
from .torch_internals import fake_process_group


def count_update(
    recipe: Recipe, rank: int, degrees: Degrees, vocab_size: int, *, on_gpu: bool
) -> StepCounts:
    """Return the counts of a rank's optimizer step, with all of its matrices.

    The matrices of a step are divided among ranks, so that a rank's share is not linear in the
    number of blocks. The optimizer is the one that trains; its tensors have shapes alone.

    Args:
        recipe: the recipe, validated for these degrees; its model names its parameters.
        rank: the rank.
        degrees: the size of each mesh axis.
        vocab_size: the tokenizer's vocabulary size.
        on_gpu: compute as a GPU would.
    """
    config = recipe.model.with_vocab(vocab_size)
    optimizer_config = recipe.optimizer.for_gpu() if on_gpu else recipe.optimizer
    optimizer_config = optimizer_config.model_copy(update={"groups": []})
    prefixes = _held_prefixes(recipe, config, degrees, rank)
    found = [
        each
        for each in placements(recipe, degrees, vocab_size)
        if prefixes is None or each.name.startswith(prefixes)
    ]
    matrices = [
        each.name for each in found if maps_hidden_states(each.name, each.shape, config.layout)
    ]
    counter = StepCounter(CollectiveMatcher(degrees, rank))
    counter.matcher.in_update = True
    with fake_process_group(rank, degrees.world):
        at = LocalRank(recipe.parallel, degrees, rank, CPU, None, is_simulated=True)
        placed = place_parameters(found, matrices, at)
        with FakeTensorMode(allow_non_fake_inputs=True):
            weights = []
            for name, each in placed.items():
                sizes = [end - first for first, end in each.part(each.rank)]
                weight = torch.nn.Parameter(torch.empty(sizes))
                weight.grad = torch.empty(sizes)
                weights.append((name, weight))
            groups = parameter_groups(weights, optimizer_config, placements=placed)
            optimizer = optimizer_config.build(groups, CPU)
            with counter:
                optimizer.step()
            counter.counts.held["optimizer"] = bytes_of_state(optimizer)
    return counter.counts


def _held_prefixes(
    recipe: Recipe, config: ModelConfig, degrees: Degrees, rank: int
) -> tuple[str, ...] | None:
    """Return how the names of the parameters begin that a rank's stages hold; None: all are."""
    if degrees.pipeline == 1:
        return None
    layout, place = config.layout, degrees.coordinate(rank).pipeline
    cut = cut_blocks(recipe.parallel.pipelining, degrees.pipeline, config)
    prefixes = list[str]()
    for stage in cut.stages_of(place):
        prefixes += [f"{layout.blocks}.{number}." for number in cut.held_blocks(stage)]
        prefixes += [f"{layout.embed}."] * cut.has_embedding(stage)
        prefixes += [f"{layout.head}."] * (stage == cut.stages - 1)
    return tuple(prefixes)
