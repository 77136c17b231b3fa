"""Writes a state into safetensors files: plans who writes what, copies it in memory, writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.heartbeat import heartbeat
from ..core.local import local
from .box import local_box
from .chunks import CODES, INDEX, LocalChunk, file_name, lay_out_chunks, tensor_entries, write_index
from .manifest import FileEntry, TensorEntry
from .ranks import Ranks
from .tables import Allocate
from .tensors import as_bytes

BLOCK_BYTES = 2**22
"""hashed and written at a time, so that the second finds the bytes in the processor's cache"""


class Writer:
    """Writes one state after another; keeps the plan and the memory for copies between them.

    What several ranks hold alike is divided between them: each writes, and copies, only its part.

    Args:
        allocate: returns memory for a copy of a tensor; None where nothing is ever copied.
    """

    def __init__(self, ranks: Ranks, allocate: Allocate | None) -> None:
        self._ranks = ranks
        self._allocate = allocate
        self._held: list[LocalChunk] | None = None
        self._chunks: list[LocalChunk] = []
        self._files: list[list[LocalChunk]] = []
        self._sources: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}

    @property
    def planned_bytes(self) -> int:
        """The number of bytes that this rank will write."""
        return sum(chunk.bytes for chunk in self._chunks)

    def plan(self, state: Mapping[str, Tensor]) -> None:
        """Decide which rank writes what; agreed once, as long as names and shapes stay."""
        held: list[LocalChunk] = []

        def is_unchanged() -> bool:
            held.extend(chunk for name in state if (chunk := _chunk(name, state[name])))
            return held == self._held

        # Comparing is one small collective; a new plan gathers the names and boxes of every rank.
        # What raises must do so inside of it, or the other ranks would wait for this one.
        if not self._ranks.reduce(is_unchanged, all):
            self._buffers.clear()
            self._chunks, self._files = self._ranks.scatter(lambda: held, _divide)
            self._held = held
        self._sources = {chunk.name: local(state[chunk.name]) for chunk in self._chunks}

    def copy(self, after: torch.cuda.Event | None) -> torch.cuda.Event | None:
        """Copy this rank's part into memory of our own, which the next copy uses again.

        Args:
            after: what the GPU must have done before the state may be read.

        Returns:
            an event that the GPU passes when it has made the copies, or None without a GPU.
        """
        assert self._allocate is not None
        if after is not None:
            # A thread starts with GPU 0, on which leaving the stream below would open a context.
            torch.cuda.set_device(after.device)
        # A stream of its own lets the copies run beside the next step's kernels.
        side = None if after is None else torch.cuda.Stream(after.device)  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(side):
            if side and after:
                side.wait_event(after)
            for name, source in self._sources.items():
                heartbeat.touch()
                if name not in self._buffers:
                    self._buffers[name] = self._allocate(source)
                buffer = self._buffers[name]
                # Copies into ordinary memory must block: the GPU could fill it after it is read.
                buffer.copy_(source, non_blocking=source.is_cuda and buffer.is_pinned())
        self._sources = dict(self._buffers)
        return side.record_event() if side else None

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write this rank's part, or its copy, into a folder that exists, and sync it.

        Returns:
            the file that was written, by name; nothing where this rank has nothing to write.
        """
        sources, self._sources = self._sources, {}
        if not self._chunks:
            return {}
        name, layout = file_name(self._ranks.rank), lay_out_chunks(self._chunks)
        digest = xxhash.xxh3_128(layout.head)
        with open(folder / name, "xb") as file:
            file.write(layout.head)
            for chunk_name in layout.offsets:
                heartbeat.touch()
                content = as_bytes(sources[chunk_name].cpu().contiguous().view(-1))
                # A file's bytes are hashed on their way, so that they are not read again.
                for first in range(0, len(content), BLOCK_BYTES):
                    block = content[first : first + BLOCK_BYTES]
                    digest.update(block)
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())  # before the manifest says that these bytes are there
        return {name: FileEntry(bytes=layout.size, xxh3=digest.hexdigest())}

    def finish(self, folder: Path) -> dict[str, FileEntry]:
        """Write the index, on rank 0 after all have written."""
        return {INDEX: write_index(folder, self._files)}

    def tensors(self) -> dict[str, TensorEntry]:
        """Return every tensor of the planned state over all ranks; known on rank 0."""
        return tensor_entries(self._files)


def _chunk(name: str, tensor: Tensor) -> LocalChunk | None:
    """Return the part of a tensor that this rank holds, or None if it holds nothing of it.

    Raises:
        CheckpointError: safetensors files have no such dtype.
    """
    if tensor.dtype not in CODES:
        raise CheckpointError(f"{name} is {tensor.dtype}: safetensors files hold no such dtype")
    box = local_box(tensor)
    # An uneven split leaves some ranks without elements. A tensor that is empty everywhere stays.
    if box is None or (tensor.numel() and not prod(box.sizes)):
        return None
    return LocalChunk(name, tensor.dtype, tuple(tensor.shape), box)


def _divide(held: list[list[LocalChunk]]) -> list[tuple[list[LocalChunk], list[list[LocalChunk]]]]:
    """Give each chunk to the rank that has the fewest bytes among those that hold it.

    Args:
        held: the chunks that each rank holds.

    Returns:
        for each rank, what it writes; and on rank 0, what every rank writes.
    """
    holders: dict[tuple[str, tuple[int, ...]], tuple[LocalChunk, list[int]]] = {}
    for rank, chunks in enumerate(held):
        for chunk in chunks:
            # Replicas hold the same box; its start tells the shards of a tensor apart.
            holders.setdefault((chunk.name, chunk.box.start), (chunk, []))[1].append(rank)
    files: list[list[LocalChunk]] = [[] for _ in held]
    filled = [0] * len(held)
    # Greedy in the order of the state, which is the same on all ranks and at each save.
    for chunk, ranks in holders.values():
        emptiest = min(ranks, key=lambda rank: filled[rank])
        files[emptiest].append(chunk)
        filled[emptiest] += chunk.bytes
    return [(chunks, [] if rank else files) for rank, chunks in enumerate(files)]
