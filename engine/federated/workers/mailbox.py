"""Memory that two processes of a machine share, and the pipe that says what is in it."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from ...core.local import local

ALIGNMENT = 64
"""bytes; the widest dtype must begin at a multiple of its size"""
Message = dict[str, Any]


class Mailbox:
    """Sends messages with tensors to another process of this machine, and receives them.

    A message is JSON, never code. Its tensors lie one after another in memory that both processes
    have mapped. They take turns: who has sent tensors waits for an answer before it sends more.

    Args:
        pipe: this process's end of the pipe.
        file: descriptor of the shared memory, which grows as needed.
        device: where tensors go that the sender has on a device.

    Attributes:
        pipe: what tells that a message is there.
    """

    def __init__(self, pipe: Connection, file: int, device: torch.device) -> None:
        self.pipe = pipe
        self._file = file
        self.device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        """Give the pipe and the memory back."""
        self.pipe.close()
        os.close(self._file)

    def send(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send a message and copies of tensors.

        Raises:
            OSError: the other process has ended.
        """
        entries, size = dict[str, Any](), 0
        flat = {name: local(tensor).contiguous() for name, tensor in (tensors or {}).items()}
        for name, tensor in flat.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries[name] = [dtype, list(tensor.shape), size, tensor.device.type == "cpu"]
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._map(size)
        for name, tensor in flat.items():
            start = entries[name][2]
            data = tensor.reshape(-1).view(torch.uint8)
            self._memory[start : start + data.numel()].copy_(data)
        content = {**message, "tensors": entries, "size": size}
        self.pipe.send_bytes(json.dumps(content).encode())

    def receive(self) -> tuple[Message, dict[str, Tensor]]:
        """Wait for a message, and return it with its tensors by name.

        Raises:
            EOFError, OSError: the other process has ended.
        """
        message: Message = json.loads(self.pipe.recv_bytes())
        self._map(message.pop("size"))
        tensors = {}
        for name, (dtype, shape, start, is_on_cpu) in message.pop("tensors").items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            # Copied: the sender writes there again.
            data = self._memory[start : start + tensor.nbytes]
            tensor.reshape(-1).view(torch.uint8).copy_(data)
            tensors[name] = tensor if is_on_cpu else tensor.to(self.device)
        return message, tensors

    def _map(self, size: int) -> None:
        """Map so many bytes of the memory."""
        if size > self._memory.numel():
            # Never shrunk: a process that reads what is no longer there is killed.
            if size > os.fstat(self._file).st_size:
                os.ftruncate(self._file, size)
            self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)


def create_memory() -> int:
    """Return a descriptor of memory that has no name, and is gone with its last user.

    Unlike /dev/shm, which containers keep small, it is limited by the machine's memory alone.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainer-client")
    with tempfile.TemporaryFile() as file:  # macOS
        return os.dup(file.fileno())
