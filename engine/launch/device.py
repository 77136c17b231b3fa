"""Where a rank computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core.errors import EnvironmentFault

if TYPE_CHECKING:
    from .environment import World


def pick_device(world: World) -> torch.device:
    """Return this process's GPU, or the CPU where there is none.

    Raises:
        EnvironmentFault: more processes than GPUs on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # A scheduler that shows each task its own GPU alone calls it number 0.
    number = 0 if visible == 1 and world.launcher == "slurm" else world.local_rank
    if number >= visible:
        raise EnvironmentFault(
            f"local rank {number} has no GPU: this machine has {visible}",
            "start at most one process a GPU",
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
