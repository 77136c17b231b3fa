"""Whether matrices, momentum and averages of the weights fit the optimizer of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.text.tree import Finding
from ..schema import Recipe
from .matrix_checks import check_matrices


def check_update(recipe: Recipe) -> Iterator[Finding]:
    """Yield everything that does not fit.

    Args:
        recipe: tables that are each valid alone.
    """
    yield from check_matrices(recipe)
    optimizer, schedule = recipe.optimizer, recipe.schedule
    for key, default in {"last_steps": 0, "blend": 1.0}.items():
        if not recipe.ema.decay and getattr(recipe.ema, key) != default:
            yield ("ema", key), "there is no average without ema.decay", "give ema.decay"
    if recipe.ema.nesterov.scale:
        path = ("ema", "nesterov", "scale")
        if optimizer.averages_weights:
            yield path, f'"{optimizer.name}" trains other weights than its average', "set it to 0"
        if recipe.precision.parameters == "bf16":
            message = "weights in bf16 are too coarse for the way ahead"
            yield path, message, 'set it to 0, or precision.parameters = "fp32"'
        if recipe.ema.nesterov.start >= recipe.ema.nesterov.end:
            yield ("ema", "nesterov", "end"), "it is not after ema.nesterov.start", "raise it"
    if optimizer.averages_weights and recipe.ema.decay:
        message = f'"{optimizer.name}" averages the weights already'
        yield ("ema", "decay"), message, "set ema.decay = 0"
    has_momentum = {"momentum", "betas"} & type(optimizer).model_fields.keys()
    if not schedule.changes_momentum or (has_momentum and not optimizer.averages_weights):
        return
    keys = ("momentum_warmup_steps", "momentum_cooldown_steps", "cycle_momentum")
    for key in keys:
        if value := getattr(schedule, key, 0):
            off = "false" if value is True else "0"
            message = f'"{optimizer.name}" has no momentum that the schedule could change'
            yield ("schedule", key), message, f"set schedule.{key} = {off}"
