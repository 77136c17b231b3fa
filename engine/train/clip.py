"""The global gradient norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.local import num_parts


def global_norm(
    gradients: Sequence[tuple[Tensor, Tensor]], holders: int, device: torch.device
) -> Tensor:
    """Return the L2 norm of gradients over all ranks.

    Args:
        gradients: split over ranks in any way, each with the part of it that this rank holds.
        holders: ranks that hold the same gradients, whole or in parts.
        device: where the ranks' collectives are; offloaded gradients are elsewhere.
    """
    if holders == 1 and not dist.is_initialized():
        return torch.nn.utils.get_total_norm([part for _, part in gradients], foreach=True)
    by_count: dict[int, list[Tensor]] = defaultdict(list)
    for gradient, part in gradients:
        by_count[num_parts(gradient)].append(part)
    # Each part is held by as many ranks: it counts once.
    squares = [
        torch.stack(torch._foreach_norm(tensors, dtype=torch.float32)).square().sum()
        * (count / holders)
        for count, tensors in by_count.items()
    ]
    total = torch.stack(squares).sum().to(device)
    dist.all_reduce(total)
    return total.sqrt()
