"""The implementations of kernels that a recipe names, on the device of the run."""

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
        recipe: the run's recipe.
        device_type: "cpu" or "cuda".
        trains: whether the recipe is that of a run on this machine. Where a checkpoint is read, an
            implementation that its recipe names and that cannot run here is replaced by "auto".

    Raises:
        RecipeError: an implementation that the recipe names cannot run on this device or machine.
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


def describe_choices(kernels: Kernels) -> list[str]:
    """Return a line for each implementation: its operations, its name, and why it was chosen."""
    operations: dict[str, list[str]] = {}
    for operation, reason in kernels.reasons.items():
        operations.setdefault(reason, []).append(operation)
    return [
        f"{', '.join(names)}: {reason.replace(': ', ' (', 1)})"
        for reason, names in operations.items()
    ]
