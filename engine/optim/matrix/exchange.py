"""Brings matrices to the ranks that orthogonalize them, and the results back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.torch_private import all_to_all_single, foreach_copy_, wait_tensor
from .rounds import Round, Transfer

Pending = Tensor | list[Tensor]
"""elements of all pieces that are received, [N], or the pieces where nothing is sent"""


def start_transfer(
    transfer: Transfer,
    pieces: Sequence[Tensor],
    group: ProcessGroup | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Pending:
    """Start to send this rank's pieces; `finish_transfer` waits for those that it receives.

    Args:
        transfer: what goes where.
        pieces: the tensors of `transfer.sent`.
        group: process group of the ranks.
        dtype: dtype in which the pieces travel.
        device: device of the collective.
    """
    if group is None or not transfer.is_needed:
        return [piece.to(device, dtype) for piece in pieces]
    if pieces:
        flat = torch.cat([piece.reshape(-1) for piece in pieces]).to(device, dtype)
    else:
        flat = torch.empty(0, dtype=dtype, device=device)
    # The operator of torch, whose result is not waited for: the next round is gathered while the
    # matrices of this one are multiplied.
    received: Tensor = all_to_all_single(
        flat, transfer.received_sizes, transfer.sent_sizes, group.group_name
    )
    return received


def finish_transfer(transfer: Transfer, pending: Pending) -> list[Tensor]:
    """Wait for the result of `start_transfer`, and return the pieces of `transfer.received`."""
    if isinstance(pending, list):
        return pending
    parts = torch.split(wait_tensor(pending), [piece.size for piece in transfer.received])
    return [part.view(piece.shape) for part, piece in zip(parts, transfer.received, strict=True)]


def assemble_matrices(
    this: Round, pending: Pending, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Wait for the pieces of the matrices that this rank owns; return [number, rows, columns].

    Args:
        this: the round.
        pending: what `start_transfer` returned of `this.gather`.
        dtype: dtype of the pieces.
        device: device of the pieces.
    """
    received, pieces = this.gather.received, finish_transfer(this.gather, pending)
    if isinstance(pending, Tensor):
        if [piece.tensor for piece in received] == list(range(this.num_owned)):
            # Each came whole, in order.
            return pending.view(this.num_owned, *this.shape)
    elif pieces:
        return torch.stack(pieces)
    matrices = torch.empty(this.num_owned, *this.shape, dtype=dtype, device=device)
    if pieces:
        foreach_copy_([matrices[piece.slices] for piece in received], pieces)
    return matrices
