"""Counts, operation by operation, the bytes that live tensors hold."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ACTIVATIONS, BACKWARD, GATHERED = "activations", "backward", "gathered weights"
"""Kinds: what the forward pass makes, what the backward pass makes (gradients, and what it needs
for a moment), and weights that FSDP has gathered."""


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all storages that operations make, real ones or simulated.

    A storage counts until it is freed; `resize_` (FSDP gives back what it gathered) changes it.
    Where several tensors share a storage, it counts once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.kind = ACTIVATIONS
        self._live: dict[int, tuple[str, int]] = {}
        self._now: Counter[str] = Counter()
        self._total = 0
        self._paused = 0
        self._fake = active_fake_mode()

    @contextmanager
    def labelled(self, kind: str) -> Iterator[None]:
        """Count what is made meanwhile as `kind`."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def add(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count tensors that exist, or count them anew as another kind."""
        for tensor in tensors:
            self._count(tensor, kind, relabel=True)

    def _count(self, tensor: Tensor, kind: str, relabel: bool = False) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if isinstance(tensor, _asynchronous()):
            tensor = cast(Any, tensor).elem
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            if relabel:
                self._change(key, kind, self._live[key][1])
            return
        self._change(key, kind, _size(storage))
        weakref.finalize(storage, self._forget, key)

    def _change(self, key: int, kind: str, size: int) -> None:
        self._forget(key)
        self._live[key] = (kind, size)
        self._now[kind] += size
        self._total += size
        if self._total > self.peak:
            self.peak = self._total
            self.at_peak = Counter(self._now)

    def _forget(self, key: int) -> None:
        kind, size = self._live.pop(key, ("", 0))
        self._now[kind] -= size
        self._total -= size

    def __enter__(self) -> MemoryTracker:
        original = torch.UntypedStorage.resize_
        tracker = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = original(storage, size)
            if (key := storage._cdata) in tracker._live:
                tracker._change(key, GATHERED, _size(storage))
            return found

        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate_uncounted(*args: Any) -> Any:
            # It computes on tensors of global shape, which nothing ever holds.
            tracker._paused += 1
            try:
                return propagate(*args)
            finally:
                tracker._paused -= 1

        self._patches: list[Any] = [
            patch.object(torch.UntypedStorage, "resize_", resize),
            patch.object(
                ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted
            ),
        ]
        for each in self._patches:
            each.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for each in self._patches:
            each.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self._fake is not None and func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # simulated, it would make another tensor
        found = func(*args, **(kwargs or {}))
        if not self._paused and active_fake_mode() is self._fake:
            in_backward = torch._C._current_graph_task_id() != -1
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    self._count(tensor, BACKWARD if in_backward else self.kind)
        return found


def _asynchronous() -> type:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor


def _size(storage: torch.UntypedStorage) -> int:
    """Return the bytes that an allocator hands out for a storage: a multiple of 512."""
    return -(-int(storage.nbytes()) // 512) * 512
