"""Asynchronous tensor parallelism: products that are computed while their pieces travel.

Inductor's micro-pipeline pass replaces a gather before products, and a reduce-scatter after one, by
fused operations on symmetric memory, which pass pieces between GPUs as they are needed (Wang et al.
2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from warnings import catch_warnings

from ...core.errors import EnvironmentFault
from .. import collectives

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

DEVICES = ("cuda",)
"""that have symmetric memory"""


def overlap(group: ProcessGroup, device: torch.device) -> None:
    """Let inductor fuse products with a group's collectives in blocks that it compiles from now on.

    Raises:
        EnvironmentFault: the device has no symmetric memory.
    """
    if device.type not in DEVICES:
        raise EnvironmentFault(
            f"parallel.async_tensor needs GPUs, and this rank computes on {device.type}",
            "set parallel.async_tensor = false",
        )
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with catch_warnings(action="ignore", category=FutureWarning):
        # Symmetric memory no longer needs it; the pass still asks whether it was called.
        enable_symm_mem_for_group(group.group_name)
    config._micro_pipeline_tp = True
    collectives.fusing = True
