"""Rows of tensors that ranks gather, though each has another number of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

MAX_DIMS = 8


class SampleRows:
    """Predictions and targets of this rank, one row a sample."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, Tensor]] = []

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        self._batches.append((predictions, targets))

    def gather(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return those of all ranks, in the order of ranks, on the CPU."""
        columns = zip(*self._batches, strict=True) if self._batches else ((), ())
        predictions, targets = (
            gather_rows(torch.cat(each) if each else None, device) for each in columns
        )
        return predictions, targets


def gather_rows(rows: Tensor | None, device: torch.device) -> Tensor:
    """Gather tensors whose first dimensions differ between ranks; all ranks call this function.

    Args:
        rows: of this rank, [N, ...]; None: it has none, and does not know their shape.
        device: where collectives run.

    Returns:
        the rows of all ranks one after the other, on the CPU; fp32 of shape [0] if there are none.
    """
    if not dist.is_initialized():
        return torch.empty(0) if rows is None else rows.cpu()
    shape = [] if rows is None else [*rows.shape]
    is_float = rows is not None and rows.is_floating_point()
    own = [len(shape), is_float, *shape, *[0] * (MAX_DIMS - len(shape))]
    headers = [torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=device) for _ in _ranks()]
    dist.all_gather(headers, torch.tensor(own, device=device))
    known = [header.tolist() for header in headers]
    example = max(known)  # every rank with rows knows all but their number
    if not example[0]:
        return torch.empty(0)
    counts = [header[2] for header in known]
    row_shape = example[3 : 2 + example[0]]
    dtype = torch.float32 if example[1] else torch.int64
    # Padded to the largest number, because collectives want equal shapes.
    padded = torch.zeros(max(counts), *row_shape, dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in _ranks()]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count].cpu() for part, count in zip(gathered, counts, strict=True)])


def _ranks() -> range:
    return range(dist.get_world_size())
