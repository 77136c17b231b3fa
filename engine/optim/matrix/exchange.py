"""Brings matrices to the ranks that orthogonalize them, and the results back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.torch_private import all_to_all_single, foreach_copy_, wait_tensor
from .rounds import Piece, Round, Transfer


def join_pieces(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the elements of pieces one after the other, [N], in the dtype of `like`."""
    return torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else like.new_empty(0)


def split_pieces(pieces: Sequence[Piece], flat: Tensor) -> list[Tensor]:
    """Return views of the elements of pieces that follow each other in a tensor, [N]."""
    parts = torch.split(flat, [piece.size for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


def start_transfer(transfer: Transfer, flat: Tensor, group: ProcessGroup | None) -> Tensor:
    """Start an all-to-all; `finish_transfer` waits for the pending result.

    Args:
        transfer: what goes where.
        flat: the elements of `transfer.sent`, [N].
        group: process group of the ranks.
    """
    if group is None or not transfer.is_needed:
        return flat
    # The operator of torch, whose result is not waited for: the next round is gathered while the
    # matrices of this one are multiplied.
    received: Tensor = all_to_all_single(
        flat, transfer.received_sizes, transfer.sent_sizes, group.group_name
    )
    return received


def finish_transfer(transfer: Transfer, pending: Tensor, group: ProcessGroup | None) -> Tensor:
    """Wait for the result of `start_transfer`: the elements of `transfer.received`, [N]."""
    if group is None or not transfer.is_needed:
        return pending
    received: Tensor = wait_tensor(pending)
    return received


def assemble_matrices(this: Round, flat: Tensor) -> Tensor:
    """Return the matrices that this rank owns, [number, rows, columns].

    Args:
        this: the round.
        flat: what `finish_transfer` returned of `this.gather`.
    """
    received = this.gather.received
    if [piece.tensor for piece in received] == list(range(this.num_owned)):
        return flat.view(this.num_owned, *this.shape)  # each came whole, in order
    matrices = flat.new_empty(this.num_owned, *this.shape)
    foreach_copy_([matrices[piece.slices] for piece in received], split_pieces(received, flat))
    return matrices
