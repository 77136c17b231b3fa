"""The modes that `[checkpoint] mode` names. Torch-free until one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .tables import Allocate, CheckpointMode, checkpoint_modes

if TYPE_CHECKING:
    from torch import Tensor


@checkpoint_modes.register
class Sync(CheckpointMode):
    """Training waits until the state is on the disk."""

    name: Literal["sync"] = "sync"

    def build(self) -> None:
        """Return None: the state itself is written."""


@checkpoint_modes.register
class Async(CheckpointMode):
    """The state is copied, and the copy is written while training continues."""

    name: Literal["async"] = "async"

    def build(self) -> Allocate:
        """Return what allocates ordinary memory."""
        import torch

        return lambda source: torch.empty(source.shape, dtype=source.dtype)


@checkpoint_modes.register
class AsyncPinned(CheckpointMode):
    """As "async", with page-locked memory, which a GPU fills while it computes."""

    name: Literal["async_pinned"] = "async_pinned"

    def build(self) -> Allocate:
        """Return what allocates page-locked memory; without a GPU, ordinary memory."""
        import torch

        def allocate(source: Tensor) -> Tensor:
            return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)

        return allocate
