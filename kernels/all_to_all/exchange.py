"""The exchange of rows between ranks, with its gradient. Experimental: not tried on GPUs yet.

By torch's collectives, or through symmetric memory, where the host need not know how many rows go
where. Which one serves is agreed on by all ranks, once, and `Exchange.reason` says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from . import symmetric


def all_to_all_v(
    x: Tensor, splits: Tensor, max_rows: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the rows that the ranks sent to this one, in their order, and how many each sent.

    The host waits for the device, since torch's collective wants its splits there.

    Args:
        x: [T, D], sorted by the rank that rows go to; rows that splits have and x has not are 0.
        splits: int64 [W], how many rows go to each rank.
        max_rows: how many the result has room for. Those that come after are dropped; the counts
            show it.
        group: of W ranks, each of which calls this.

    Returns:
        [max_rows, D], 0 behind the last row that came, and int64 [W].
    """
    received = torch.empty_like(splits)
    dist.all_to_all_single(received, splits.contiguous(), group=group)
    send, receive = splits.tolist(), received.tolist()
    # The collective sends as many rows as splits say.
    rows = x.new_zeros(sum(send), x.shape[1])
    rows[: len(x)] = x[: len(rows)]
    came = x.new_empty(sum(receive), x.shape[1])
    dist.all_to_all_single(came, rows, receive, send, group=group)
    out = x.new_zeros(max_rows, x.shape[1])
    out[: len(came)] = came[:max_rows]
    return out, received


Implementation = Literal["auto", "torch", "symmetric"]
Shuffle = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Exchange:
    """Sends rows to ranks: `out, received = exchange(x, splits)`."""

    shuffle: Shuffle
    max_rows: int
    reason: str
    """ "implementation: why" """

    def __call__(self, x: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `all_to_all_v` does; gradients go the same way back.

        Raises:
            ValueError: x has more rows than there is room for.
        """
        if len(x) > self.max_rows:
            raise ValueError(f"{len(x)} rows, and room for {self.max_rows}: raise max_rows")
        out, received = _Exchanged.apply(x, splits, self.shuffle)  # type: ignore[no-untyped-call]
        return out, received


def make_exchange(
    group: dist.ProcessGroup,
    device: torch.device,
    max_rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    implementation: Implementation = "auto",
) -> Exchange:
    """Return how ranks exchange rows; every rank of the group calls this with the same arguments.

    Args:
        group: the ranks.
        device: where rows are.
        max_rows: the most that a rank sends or receives at a time.
        width: numbers a row.
        dtype: of them.
        implementation: "auto" is torch's, the fastest measured. Where "symmetric"
            cannot serve one of the ranks, all take torch's, with a warning that says why.

    Raises:
        ValueError: there is no such implementation.
    """
    if implementation not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"no exchange is named {implementation!r}; known: {known}")
    reason = "fastest measured" if implementation == "auto" else "requested"
    if implementation == "symmetric":
        fault, buffers = _symmetric(group, device, max_rows, width * dtype.itemsize)
        if buffers is not None:
            return Exchange(buffers.exchange, max_rows, f"symmetric: {reason}")
        reason = f"no symmetric memory: {fault}"
        warnings.warn(f"rows are exchanged by torch's collectives: {reason}", stacklevel=2)

    def shuffle(x: Tensor, splits: Tensor) -> tuple[Tensor, Tensor]:
        return all_to_all_v(x, splits, max_rows, group)

    return Exchange(shuffle, max_rows, f"torch: {reason}")


def _symmetric(
    group: dist.ProcessGroup, device: torch.device, max_rows: int, row_bytes: int
) -> tuple[str, symmetric.Buffers | None]:
    """Return why a rank cannot, or the buffers where all can."""
    # All ranks decide alike: one that took the other exchange would wait for ever.
    if fault := _first_fault(group, _without_symmetric_memory(device, row_bytes)):
        return fault, None
    buffers, fault = None, ""
    try:
        buffers = symmetric.allocate(group, device, max_rows, row_bytes)
    except Exception as error:  # drivers, links and torch's builds each have errors of their own
        fault = f"{type(error).__name__}: {error}"
    fault = _first_fault(group, fault)
    return fault, None if fault else buffers


def _without_symmetric_memory(device: torch.device, row_bytes: int) -> str:
    if device.type != "cuda":
        return f"GPUs have it, and this is a {device.type.upper()}"
    if not find_spec("triton"):
        return "the package triton is not installed"
    if row_bytes % symmetric.ROW_BYTES:
        return f"rows of {row_bytes} bytes are no multiple of {symmetric.ROW_BYTES}"
    return ""


def _first_fault(group: dist.ProcessGroup, fault: str) -> str:
    """Return the same text on all ranks, empty where none has a fault."""
    faults: list[Any] = [""] * group.size()
    dist.all_gather_object(faults, fault, group=group)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(faults) if each), "")


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Tensor, shuffle: Shuffle) -> tuple[Tensor, Tensor]:
        out, received = shuffle(x, splits)
        ctx.save_for_backward(received)
        ctx.shuffle, ctx.rows = shuffle, len(x)
        # Counts are integers.
        ctx.mark_non_differentiable(received)
        return out, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        (received,) = ctx.saved_tensors
        # Rows come back in the order in which they were sent, each rank's together.
        grad_x, _ = _Exchanged.apply(grad, received, ctx.shuffle)  # type: ignore[no-untyped-call]
        return grad_x[: ctx.rows], None, None
