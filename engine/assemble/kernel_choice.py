"""Which implementations a recipe's `[kernels]` table chooses on a device."""

from __future__ import annotations

from ...kernels.choose import Kernels, UnavailableKernelsError, choose
from ...kernels.registry import kernels as registered_kernels
from ...model_zoo.base import Model
from ...model_zoo.layers.moe import moe_layers
from ..core.errors import Problem, RecipeError
from ..recipe.schema import Recipe


def choose_kernels(recipe: Recipe, device_type: str, *, trains: bool = True) -> Kernels:
    """Return the implementation of each operation.

    Args:
        recipe: the run's recipe.
        device_type: "cpu" or "cuda".
        trains: whether the recipe is that of a run on this machine. Where a checkpoint is read, an
            implementation that its recipe names and that cannot run here is replaced by "auto".

    Raises:
        RecipeError: an implementation that the recipe names cannot run on this device or machine.
    """
    compiling = trains and recipe.compile.enabled and recipe.compile.backend == "inductor"
    wanted = {
        operation: name
        for operation, name in recipe.kernels.model_dump().items()
        if trains or name == "auto" or not registered_kernels[operation][name].obstacle(device_type)
    }
    if not trains and wanted.get("linear_cross_entropy") == "compiled":
        del wanted["linear_cross_entropy"]  # compiling takes longer than a few losses
    try:
        return choose(wanted, device_type, recipe.data.seq_len, compiling=compiling)
    except UnavailableKernelsError as error:
        raise RecipeError(
            [
                Problem(
                    f'"{wanted[operation]}" cannot run here: {why}',
                    key=f"kernels.{operation}",
                    hint='choose "torch", or leave it to "auto"',
                )
                for operation, why in error.reasons.items()
            ]
        ) from None


def describe_choices(kernels: Kernels, *, ragged: bool = False) -> list[str]:
    """Return a line for each implementation: its operations, its name, and why it was chosen.

    Args:
        kernels: the implementations.
        ragged: whether rows have unequal lengths; else nothing attends within them.
    """
    operations: dict[str, list[str]] = {}
    for operation, reason in kernels.reasons.items():
        if ragged or operation != "ragged_attention":
            operations.setdefault(reason, []).append(operation)
    return [
        f"{', '.join(names)}: {reason.replace(': ', ' (', 1)})"
        for reason, names in operations.items()
    ]


def require_fused(model: Model) -> None:
    """Refuse a model with other experts than fused ones.

    Raises:
        RecipeError: a layer has experts that no fused kernel computes.
    """
    for name, layer in moe_layers(model).items():
        if not layer.is_fused:
            message = (
                f'"fused" computes SwiGLU experts, and {name} has {type(layer.experts).__name__}'
            )
            hint = 'choose "torch", or leave it to "auto"'
            raise RecipeError([Problem(message, key="kernels.moe", hint=hint)])
