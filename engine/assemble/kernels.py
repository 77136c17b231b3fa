"""The kernels that a recipe asks for, on the device that it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...kernels.choose import Kernels, UnavailableKernelsError, choose
from ...kernels.registry import kernels
from ..core.errors import Problem, RecipeError

if TYPE_CHECKING:
    from ..recipe.schema import Recipe


def choose_kernels(recipe: Recipe, device_type: str, *, trains: bool = True) -> Kernels:
    """Return the implementation of each operation.

    Args:
        recipe: of the run.
        device_type: "cpu" or "cuda".
        trains: the recipe speaks of this machine. What a checkpoint was trained with on another
            does not bind those who read it.

    Raises:
        RecipeError: one that the recipe names cannot run on the device, or on this machine.
    """
    compiling = recipe.compile.enabled and recipe.compile.backend == "inductor"
    wanted = {
        operation: name
        for operation, name in recipe.kernels.model_dump().items()
        if trains or name == "auto" or not kernels[operation][name].obstacle(device_type)
    }
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


def served(kernels: Kernels) -> list[str]:
    """Return a line for each implementation: the operations that it serves, and why."""
    lines: dict[str, list[str]] = {}
    for operation, reason in kernels.reasons.items():
        lines.setdefault(reason, []).append(operation)
    return [f"{', '.join(operations)} by {reason}" for reason, operations in lines.items()]
