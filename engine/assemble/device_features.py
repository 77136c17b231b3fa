"""What a recipe asks of a device that the device lacks."""

from __future__ import annotations

import torch

from ..core.errors import EnvironmentFault
from ..precision.hardware import ON_CPU
from ..recipe.schema import Recipe


def require_features(recipe: Recipe, device: torch.device) -> None:
    """Refuse by name what does not run on Apple's GPUs.

    Raises:
        EnvironmentFault: the device is one of them, and the recipe asks for such a feature.
    """
    if device.type != "mps":
        return
    lacking = {
        "compile.enabled = true": recipe.compile.enabled and "torch.compile is a prototype there",
        'checkpoint.mode = "async_pinned"': recipe.checkpoint.mode == "async_pinned"
        and "its memory is the host's already",
        "parallel.fsdp.offload = true": recipe.parallel.fsdp.offload
        and "its memory is the host's already",
    }
    for key, reason in lacking.items():
        if reason:
            raise EnvironmentFault(f"{key} does not go with Apple's GPU (MPS): {reason}", ON_CPU)
