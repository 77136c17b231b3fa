"""Counts, operation by operation, the bytes that live tensors hold."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, LOSS, COMMUNICATION = "activations", "logits and loss", "communication"
TEMPORARY, BATCH = "temporary", "batch"
RECEIVED = "received"
"""what a pipeline exchanges: counted as communication, and one for each micro batch"""
IN_CPU_MEMORY = "in CPU memory"
"""offloaded: not counted"""


@dataclass(slots=True)
class HeldMemory:
    """Memory that a storage holds. Its kind may turn out later: a gradient is made as any other."""

    kind: str
    size: int


@dataclass(frozen=True)
class MemoryPeak:
    """The most that is held at a moment, and by what."""

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
        self._paused = 0
        self._fake = active_fake_mode()

    def enter(self, segment: Hashable) -> None:
        """Begin a part of the run whose peak is asked for; it may be entered again."""
        self._segments.append((len(self._events), segment))

    def peak(self) -> MemoryPeak:
        """Return the peak of the whole run."""
        return max(self.peaks().values(), key=lambda peak: peak.total)

    def peaks(self) -> dict[Hashable, MemoryPeak]:
        """Return the peak of each segment, with what was held when it began."""
        highest: dict[Hashable, tuple[int, int]] = {}
        total, starts = 0, [*self._segments, (len(self._events), "")]
        for (start, segment), (end, _) in pairwise(starts):
            best, moment = highest.get(segment, (-1, 0))
            if total > best:
                best, moment = total, start
            for place in range(start, end):
                held, delta = self._events[place]
                if held.kind != IN_CPU_MEMORY:
                    total += delta
                    if total > best:
                        best, moment = total, place + 1
            highest[segment] = best, moment
        return self._split(highest)

    def _split(self, highest: dict[Hashable, tuple[int, int]]) -> dict[Hashable, MemoryPeak]:
        wanted = {moment for _, moment in highest.values()}
        kinds: Counter[str] = Counter()
        found = {0: Counter[str]()}
        for place, (held, delta) in enumerate(self._events, 1):
            kinds[held.kind] += delta
            if place in wanted:
                found[place] = Counter({k: n for k, n in kinds.items() if k != IN_CPU_MEMORY})
        return {
            segment: MemoryPeak(total, found[moment])
            for segment, (total, moment) in highest.items()
        }

    def live(self, kind: str) -> int:
        """Return the bytes of a kind that are held now."""
        return sum(held.size for held, _ in self._live.values() if held.kind == kind)

    @contextmanager
    def labelled(self, kind: str) -> Iterator[None]:
        """Count what is made meanwhile as `kind`, but for what a backward pass makes."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def forcing(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, all that it makes being counted as `kind`."""

        def forced(*args: Any, **kwargs: Any) -> Any:
            before, self._forced = self._forced, kind
            try:
                return function(*args, **kwargs)
            finally:
                self._forced = before

        return forced

    def add(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count tensors that exist, or count them as another kind."""
        for tensor in tensors:
            self._count(tensor, kind, relabel=True)

    def _count(self, tensor: Tensor, kind: str, relabel: bool = False) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, _asynchronous()):
            tensor = cast("Any", tensor).elem
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
        """Count a storage anew: FSDP gathers weights into it, and gives it back."""
        if entry := self._live.get(storage._cdata):
            held, size = entry[0], _size(storage)
            held.kind = COMMUNICATION
            self._events.append((held, size - held.size))
            held.size = size

    def _forget(self, key: int) -> None:
        held, _ = self._live.pop(key)
        self._events.append((held, -held.size))

    def __enter__(self) -> MemoryTracker:
        from .torch_internals import watched

        self._patches: list[Any] = [patch.object(*each) for each in watched(self)]
        for each in self._patches:
            each.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for each in self._patches:
            each.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is made meanwhile."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._fake is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # simulated, it would make another tensor
        found = func(*args, **(kwargs or {}))
        if not self._paused and active_fake_mode() is self._fake:
            kind = self._forced or self._current()
            for tensor in (found,) if isinstance(found, Tensor) else tree_leaves(found):
                if isinstance(tensor, Tensor):
                    self._count(tensor, kind)
        return found

    def _current(self) -> str:
        if torch._C._current_graph_task_id() == -1:
            return self.kind
        # Inside of a backward pass, only a forward pass that is done again wants gradients.
        return ACTIVATIONS if torch.is_grad_enabled() else TEMPORARY


def _asynchronous() -> type:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor


def _size(storage: torch.UntypedStorage) -> int:
    """Return the bytes that an allocator hands out for a storage: a multiple of 512."""
    return -(-int(storage.nbytes()) // 512) * 512
