"""Tracks the bytes of live tensors, operation by operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ....kernels.torch_private import (
    AsyncCollectiveTensor,
    FakeTensor,
    TorchDispatchMode,
    active_fake_mode,
    current_graph_task_id,
    tree_leaves,
    wait_tensor,
)
from .torch_internals import replace_attribute, watch_memory

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, LOSS, COMMUNICATION = "activations", "logits and loss", "communication"
TEMPORARY, BATCH, MONITORS = "temporary", "batch", "monitors"
RECEIVED = "received"
"""tensors that pipeline stages exchange: communication, with one buffer a micro batch"""
IN_CPU_MEMORY = "in CPU memory"
"""kind of offloaded tensors, which are not counted"""
NOT_KEPT = "not kept"
"""kind of results that eager blocks keep and compiled ones do not; they are not counted"""
UNCOUNTED = (IN_CPU_MEMORY, NOT_KEPT)
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
SUMS = {
    getattr(torch.ops.aten, name).default for name in ("view", "_unsafe_view", "detach", "alias")
} | {torch.ops.aten.add.Tensor}
"""operations whose backward pass reads no tensor"""


@dataclass(slots=True)
class HeldMemory:
    """Memory that a storage holds. Its kind may turn out later: a gradient is made as any other."""

    kind: str
    size: int


@dataclass(frozen=True)
class MemoryPeak:
    """The largest sum of live bytes at a moment, and the bytes of each kind at that moment."""

    total: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all storages that operations make, real ones or simulated.

    A storage counts until it is freed; `resize_` (FSDP gives back what it gathered) changes it.
    Where several tensors share a storage, it counts once. What happens is written down, and added
    up in the end.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here: its guard costs more than the counting

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = ACTIVATIONS
        self._forced = ""
        self._events: list[tuple[HeldMemory, int]] = []
        self._segments: list[tuple[int, Hashable]] = [(0, "")]
        self._live: dict[int, tuple[HeldMemory, weakref.ref[Any]]] = {}
        self._paused = False
        self._unread = 0
        self._fake = active_fake_mode()
        self._hooks = watch_memory(
            resized=self.resized,
            paused=self.paused,
            communicates=partial(self.attribute_to, COMMUNICATION),
            receives=partial(self.attribute_to, RECEIVED),
            keeps_gradient=lambda gradient: self.add([gradient], GRADIENTS),
        )

    def enter(self, segment: Hashable) -> None:
        """Begin a segment, whose peak is recorded; the same segment can begin again later."""
        self._segments.append((len(self._events), segment))

    def peak(self) -> MemoryPeak:
        """Return the peak of the whole run."""
        return max(self.peaks().values(), key=lambda peak: peak.total)

    def peaks(self) -> dict[Hashable, MemoryPeak]:
        """Return the peak of each segment, tensors from before the segment included."""
        counted = (0 if held.kind in UNCOUNTED else delta for held, delta in self._events)
        totals = [0, *accumulate(counted)]
        moments: dict[Hashable, int] = {}
        for (start, segment), (end, _) in pairwise([*self._segments, (len(self._events), "")]):
            highest = max(range(start, end + 1), key=totals.__getitem__)
            moments[segment] = max(moments.get(segment, highest), highest, key=totals.__getitem__)
        # Kinds are added up in a second pass, because a copy at each new maximum takes too long.
        kinds: Counter[str] = Counter()
        kinds_at, wanted = {0: Counter[str]()}, {*moments.values()}
        for moment, (held, delta) in enumerate(self._events, 1):
            if held.kind not in UNCOUNTED:
                kinds[held.kind] += delta
            if moment in wanted:
                kinds_at[moment] = kinds.copy()
        return {
            segment: MemoryPeak(totals[moment], kinds_at[moment])
            for segment, moment in moments.items()
        }

    def live(self, kind: str) -> int:
        """Return the live bytes of a kind at this moment."""
        return sum(held.size for held, _ in self._live.values() if held.kind == kind)

    def discard_unread(self) -> None:
        """Do not count the last product if only sums have read it: no backward pass needs it.

        Selective recomputation keeps such a product in an eager block, and torch's partitioner
        leaves it out of what a compiled block keeps.
        """
        if entry := self._live.get(self._unread):
            entry[0].kind = NOT_KEPT

    def labelled(self, kind: str) -> AbstractContextManager[None]:
        """Count tensors that are created in the block as `kind`, except in a backward pass."""
        return replace_attribute(self, "kind", kind)

    def attribute_to(self, kind: str) -> AbstractContextManager[None]:
        """Count all tensors that are created in the block as `kind`, also in a backward pass."""
        return replace_attribute(self, "_forced", kind)

    def paused(self) -> AbstractContextManager[None]:
        """Do not count tensors that are created in the block."""
        return replace_attribute(self, "_paused", True)

    def add(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count existing tensors as a kind, or change the kind of counted ones."""
        for tensor in tensors:
            self._count(tensor, kind, relabel=True)

    def _count(self, tensor: Tensor, kind: str, relabel: bool = False) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            if relabel:
                self._live[key][0].kind = kind
            return
        held = HeldMemory(kind, _size(storage))
        self._live[key] = held, weakref.ref(storage, lambda _: self._forget(key))
        self._events.append((held, held.size))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage, which FSDP resizes to all-gather and free weights."""
        if entry := self._live.get(storage._cdata):
            held, size = entry[0], _size(storage)
            held.kind = COMMUNICATION
            self._events.append((held, size - held.size))
            held.size = size

    def _forget(self, key: int) -> None:
        held, _ = self._live.pop(key)
        self._events.append((held, -held.size))

    def __enter__(self) -> MemoryTracker:
        self._hooks.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._fake is not None and func is wait_tensor.default:
            return args[0]  # simulated, it would make another tensor
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._unread = out.untyped_storage()._cdata
        elif func not in SUMS:
            self._unread = 0
        if not self._paused and active_fake_mode() is self._fake:
            kind = self._forced or self._current()
            for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._count(tensor, kind)
        return out

    def _current(self) -> str:
        if current_graph_task_id() == -1:
            return self.kind
        # Inside of a backward pass, only a forward pass that is done again wants gradients.
        return ACTIVATIONS if torch.is_grad_enabled() else TEMPORARY


def _size(storage: torch.UntypedStorage) -> int:
    """Return the bytes that the CUDA allocator reserves for a storage: a multiple of 512."""
    return -(-int(storage.nbytes()) // 512) * 512
