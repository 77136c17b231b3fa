"""In which dtype a step computes, and the loss scale that fp16 needs."""

from __future__ import annotations

import torch

from ..core.errors import EnvironmentFault
from .tables import Precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the recipe's word for a dtype."""
    return next(name for name, known in DTYPES.items() if known is dtype)


def compute_dtype(table: Precision, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype of a step on `device` and why it was chosen.

    Raises:
        EnvironmentFault: fp16 on a device that does not train in it.
    """
    from .hardware import multiplies_bf16

    if table.compute == "auto":
        native, reason = multiplies_bf16(device)
        return (torch.bfloat16 if native else torch.float32), reason
    if table.compute == "fp16" and device.type != "cuda":
        raise EnvironmentFault(
            f'precision.compute = "fp16" needs a GPU; this run is on {device.type}',
            'use "bf16" or "fp32"',
        )
    return DTYPES[table.compute], "as the recipe says"


class LossScale:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

    Doubles after 2,000 good steps in a row and halves at each overflow; 1 for other dtypes.
    """

    growth_interval = 2000

    def __init__(self, dtype: torch.dtype) -> None:
        self.dynamic = dtype is torch.float16
        self.value = 2.0**16 if self.dynamic else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Take note of whether the last step's gradients were finite."""
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint's manifest keeps."""
        return {"value": self.value, "good_steps": self.good_steps}

    def restore(self, state: dict[str, float]) -> None:
        """Take over what `state` returned."""
        self.value, self.good_steps = state["value"], int(state["good_steps"])
