"""What kernels ask of their operands."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def require_float(*tensors: Tensor) -> None:
    """Refuse what a kernel that sums in fp32 would silently round.

    Raises:
        TypeError: a tensor is neither fp32, fp16 nor bf16.
    """
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(f"the kernel computes in fp32 and takes no {tensor.dtype}")
