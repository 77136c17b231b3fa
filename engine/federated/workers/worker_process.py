"""A worker process as the server sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from ...launch.child import PACKAGE, rank_environment
from .mailbox import Mailbox, Message, create_memory

SETTLE_SECONDS = 5.0
"""how long a process may need to end after its pipe is closed"""
MODULE = f"{PACKAGE}.engine.federated.workers.worker"


class WorkerProcess:
    """Starts, feeds and ends a worker process that trains clients.

    Args:
        number: number of the worker, counted from 0.
        count: number of workers, which share the cores and the GPUs of the machine.
        device: where the server computes.
        log: gets what the process prints.

    Attributes:
        mailbox: reaches the process.
        client: number of the client that it trains; None: none.
        is_ready: whether it has assembled the model, and waits or trains.
        has_stepped: whether it has begun a step.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, number: int, count: int, device: torch.device, log: Path) -> None:
        self.number = number
        self.client: int | None = None
        self.is_ready = False
        self.has_stepped = False
        pipe, theirs = Pipe()
        memory = create_memory()
        self.mailbox = Mailbox(pipe, memory, device)
        passed = [theirs.fileno(), memory]
        words = [sys.executable, "-P", "-m", MODULE, *map(str, (*passed, os.getpid()))]
        environ = rank_environment(os.environ, number, count)
        if device.type == "cuda":
            environ["CUDA_VISIBLE_DEVICES"] = _choose_gpu(number)
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        try:
            self._process = subprocess.Popen(
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                # A signal of the terminal reaches the server alone, which ends the process.
                start_new_session=True,
            )
        finally:
            os.close(output)
            theirs.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def pipe(self) -> Connection[Message, Message]:
        """What tells that a message is there, or that the process has ended."""
        return self.mailbox.pipe

    def send(self, message: Message, tensors: dict[str, Tensor]) -> bool:
        """Send a message, and return whether the process was there to take it."""
        with suppress(OSError):
            self.mailbox.send(message, tensors)
            return True
        return False

    def receive(self) -> tuple[Message, dict[str, Tensor]] | None:
        """Return the message that is there; None: the process has ended."""
        with suppress(EOFError, OSError):
            return self.mailbox.receive()
        return None

    def describe_end(self) -> str:
        """Return how the process has ended, or is about to."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(SETTLE_SECONDS)
            return (
                f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            )
        return "closed its pipe"

    def end(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.mailbox.close()


def _choose_gpu(number: int) -> str:
    """Return the name of a worker's GPU, among those that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [*filter(None, visible)] or list(map(str, range(torch.cuda.device_count())))
    return names[number % len(names)]
