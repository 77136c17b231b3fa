"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32 at least.

    Args:
        x: [..., D].
        weight: [D]; cast to the dtype of x first, as sharded mixed precision does.
        eps: added to the mean square.
    """
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
