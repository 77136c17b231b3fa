"""Writes a state with torch DCP: what to write, a copy of it in memory, then the files.

Importing this module imports torch.distributed.checkpoint; the store does so at its first save.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ..core.heartbeat import heartbeat
from .manifest import FileEntry, TensorEntry, hash_file
from .ranks import Ranks

COPY_AHEAD_BYTES = 10_000_000


class Writer:
    """Writes one state after another; keeps the plan and the memory for copies between them.

    A state that several ranks hold alike is divided: each writes, and copies, only its part.

    Args:
        pinned: copy into page-locked memory, which a GPU fills while it computes.
    """

    def __init__(self, ranks: Ranks, pinned: bool = False) -> None:
        self._ranks = ranks
        self._pinned = pinned and torch.cuda.is_available()
        self._planner = _Planner()
        self._layout: Hashable = None
        self._plan = SavePlan([])
        self._metadata = Metadata({})

    @property
    def planned_bytes(self) -> int:
        """What this rank will write, in bytes."""
        return sum(item.tensor_storage_size() or 0 for item in self._plan.items)

    def plan(self, state: Mapping[str, Tensor]) -> None:
        """Decide which rank writes what; agreed once, as long as names and shapes stay."""
        layout = tuple(_describe(name, tensor) for name, tensor in state.items())
        self._planner.use_buffers = False
        self._planner.set_up_planner(dict(state), is_coordinator=self._ranks.rank == 0)
        if self._ranks.reduce(lambda: layout == self._layout, all):
            return
        self._planner.buffers.clear()
        self._plan, self._metadata = self._ranks.scatter(
            self._planner.create_local_plan, self._divide
        )
        self._layout = layout

    def copy(self, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Copy this rank's part into memory of our own, which the next copy uses again.

        Args:
            after: what the GPU must have done before the state may be read.

        Returns an event that the GPU passes when it has made the copies, or None when they are
        complete already.
        """
        planner = self._planner
        side = None if after is None else torch.cuda.Stream(after.device)  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(side):
            if side and after:
                side.wait_event(after)
            for item in self._plan.items:
                source = planner.lookup_object(item.index)
                if item.index not in planner.buffers:
                    planner.buffers[item.index] = torch.empty(
                        source.shape, dtype=source.dtype, device="cpu", pin_memory=self._pinned
                    )
                planner.buffers[item.index].copy_(source, non_blocking=self._pinned)
        planner.use_buffers = True
        return side.record_event() if side and self._pinned else None

    def write(self, folder: Path) -> tuple[list[WriteResult], dict[str, FileEntry]]:
        """Write this rank's part, or its copy, into a folder that exists, and sync it.

        Returns what DCP's table of contents needs, and this rank's files.
        """
        if not self._plan.items:
            return [], {}
        try:
            ahead = 0 if self._planner.use_buffers else COPY_AHEAD_BYTES
            storage = FileSystemWriter(folder, per_thread_copy_ahead=ahead)
            written = storage.write_data(self._plan, self._planner).wait()
        finally:
            self._planner.use_buffers = False
            self._planner.state_dict = {}
        names = {result.storage_data.relative_path for result in written}
        return written, {name: file_entry(folder / name) for name in sorted(names)}

    def finish(self, folder: Path, written: list[list[WriteResult]]) -> dict[str, FileEntry]:
        """Write DCP's own table of contents, on rank 0 after all have written."""
        FileSystemWriter(folder).finish(self._metadata, written)
        return {".metadata": file_entry(folder / ".metadata")}

    def tensors(self) -> dict[str, TensorEntry]:
        """Return every tensor of the planned state over all ranks; known on rank 0."""
        return {
            name: {"shape": list(entry.size), "dtype": dtype_name(entry.properties.dtype)}
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def _divide(self, plans: list[SavePlan]) -> list[tuple[SavePlan, Metadata]]:
        divided, metadata = self._planner.create_global_plan(plans)
        named = FileSystemWriter("").prepare_global_plan(divided)
        return [(plan, metadata if rank == 0 else Metadata({})) for rank, plan in enumerate(named)]


class _Planner(DefaultSavePlanner):
    """DCP's planner, which can hand out copies in place of the tensors that were planned."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.buffers: dict[MetadataIndex, Tensor] = {}
        self.use_buffers = False

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor, or its copy."""
        heartbeat.touch()
        if self.use_buffers:
            return self.buffers[index]
        return super().lookup_object(index).detach().contiguous()  # as it is read


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def file_entry(path: Path) -> FileEntry:
    """Return the size and the hash of a file."""
    return {"bytes": path.stat().st_size, "xxh3": hash_file(path)}


def _describe(name: str, tensor: Tensor) -> Hashable:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return name, tensor.shape, tensor.dtype, placed
