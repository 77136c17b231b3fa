"""Build what changes a model's weights: the optimizer, and when and in which dtype it steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.layers.largest_scores import LargestScores
from ...model_zoo.matrices import maps_hidden_states
from ..core.errors import Problem, RecipeError
from ..optim.elementwise.narrow import splits_a_block
from ..optim.parameters import avoid_dynamo_import, parameter_groups, undecorated_step
from ..optim.placement import ParameterPlacement
from ..parallel.axis import ParallelModel
from ..parallel.placement import placements_for
from ..parallel.plan import Plan
from ..precision.hardware import LossScale
from ..precision.rounding import divide_groups, make_rounded_step
from ..recipe.schema import Recipe
from ..train.update import Update, UpdateAfterBackward, UpdateInBackward
from .parameter_placements import place_parameters


def build_update(
    recipe: Recipe,
    parallel_model: ParallelModel,
    config: ModelConfig,
    plan: Plan,
    scale: LossScale,
) -> tuple[torch.optim.Optimizer, Update]:
    """Return the optimizer of a wrapped model, and what lets it change the weights.

    Args:
        recipe: the validated recipe.
        parallel_model: the model, wrapped for training; its weights are in memory.
        config: the model's config.
        plan: how ranks share it.
        scale: the loss scale that gradients are divided by.
    """
    model, degrees, device = parallel_model.model, plan.degrees, plan.device
    by_head = recipe.optimizer.updates_heads
    placements = _place(model, config, plan, by_head) if recipe.optimizer.needs_matrices else None
    groups = parameter_groups(
        model.named_parameters(), recipe.optimizer, model.remote_parameters, placements
    )
    _check_state(recipe, model)
    if recipe.optimizer.bounds_scores:
        scores = _measure_scores(model, config, plan)
        groups = [{**group, "scores": scores} for group in groups]
    is_rounded = recipe.precision.parameters == "bf16"
    groups = list(divide_groups(groups)) if is_rounded else groups
    avoid_dynamo_import()
    optimizer = recipe.optimizer.build(groups, device)
    run_step = undecorated_step(optimizer)
    if is_rounded:
        seed = recipe.run.seed if recipe.precision.stochastic_rounding else None
        named, simulated = model.named_parameters(), plan.is_simulated
        run_step = make_rounded_step(optimizer, named, seed, is_simulated=simulated)
    if recipe.memory.optimizer_in_backward:
        late = parallel_model.manually_reduced
        clip_value = recipe.optimizer.clip_value
        return optimizer, UpdateInBackward(
            optimizer, run_step, clip_value, late, degrees.world, device
        )
    update = UpdateAfterBackward(
        optimizer,
        run_step,
        recipe.optimizer.clip_norm,
        recipe.optimizer.clip_value,
        scale,
        parallel_model,
        degrees,
        device,
    )
    return optimizer, update


def _check_state(recipe: Recipe, model: Model) -> None:
    """Check that ranks divide no block of a state in 8 bits.

    Raises:
        RecipeError: they do; it names the first such parameter.
    """
    if not recipe.optimizer.has_state_in_int8:
        return
    for name, weight in model.named_parameters():
        if weight.requires_grad and splits_a_block(weight):
            message = (
                f"the plan divides the rows of {name}, of {weight.shape[-1]} elements, within "
                "blocks that share a scale"
            )
            hint = 'take "bf16" or "fp32", or fewer ranks along the rows (parallel.tensor)'
            raise RecipeError([Problem(message, key="optimizer.state_dtype", hint=hint)])


def _measure_scores(model: Model, config: ModelConfig, plan: Plan) -> dict[str, Tensor]:
    """Let attention keep the largest scores of a step; return those of all heads, [H], by path.

    Each rank of the tensor axis measures some of the heads, and knows -inf of the others.
    """
    found, number = {}, plan.degrees.coordinate(plan.rank).tensor
    num_heads = max(rows.heads for rows in config.attention_rows().values())
    own = num_heads // plan.degrees.tensor
    for path, module in model.named_modules():
        if isinstance(scores := getattr(module, "scores", None), LargestScores):
            found[path] = torch.full((num_heads,), -math.inf, device=plan.device)
            scores.keep_in(found[path][number * own : (number + 1) * own])
    return found


def _place(
    model: Model, config: ModelConfig, plan: Plan, by_head: bool
) -> dict[str, ParameterPlacement]:
    """Return the placement of each parameter of this rank.

    Raises:
        RecipeError: no parameter of the model is a matrix.
    """
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    tables = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    matrices = {
        name
        for name, shape in {**shapes, **model.remote_parameters}.items()
        if maps_hidden_states(name, shape, config.layout) and name not in tables
    }
    if not matrices:
        message = f'the model "{config.name}" has no matrices beside its embeddings and head'
        raise RecipeError([Problem(message, key="optimizer.name", hint='take "adamw"')])
    found = placements_for(shapes, config, plan.table, plan.degrees)
    return place_parameters(found, matrices, plan, config.attention_rows(), by_head=by_head)
