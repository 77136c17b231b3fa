"""What Triton knows of the GPU in use."""

from __future__ import annotations

from triton.runtime import driver

from .launch import Tiling


def current_arch() -> int:
    """Return the compute capability, as 90 for Hopper."""
    return int(driver.active.get_current_target().arch)


def num_programs(tiling: Tiling) -> int:
    """Return how many programs run at the same time."""
    active = driver.active
    properties = active.utils.get_device_properties(active.get_current_device())
    return int(properties["multiprocessor_count"]) * tiling.per_processor
