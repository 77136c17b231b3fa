"""The carrier "local" with worker processes: several clients train at a time on this machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import wait

import torch
from torch import Tensor

from ...assemble.assemble import Assembled
from ...checkpoint.state import model_state
from ...core import errors
from ...core.errors import TrainerError
from ...core.heartbeat import heartbeat
from ...core.local import local
from ...core.run_dir import RunDirectory
from ...train.parts import Position
from ..client import Client, LocalResult
from ..federation_parts import FederationParts
from ..tables import Federation
from ..workers.client_message import name_under, pack_client, select_under, unpack_client
from ..workers.mailbox import Message
from ..workers.worker_process import WorkerProcess
from .client_ranks import ClientRanks
from .local_carrier import ClientUpdate, LocalCarrier

TICK_SECONDS = 0.5
"""how often the server looks whether it is asked to stop, and whether a worker has died"""
MOST_DEATHS = 5
"""of workers that train the same client in the same round, before the run fails"""


class ProcessCarrier(LocalCarrier):
    """Trains clients in worker processes, and takes their updates in the order of their numbers.

    The server keeps the state of every client. A worker receives it with the global weights, trains
    as `LocalCarrier` does, and sends back what the model, the optimizer and the client then hold.
    The server takes that as if it had trained itself, so that every number is that of
    `LocalCarrier`, whichever worker trains a client and however often one dies.

    Args: those of `LocalCarrier`.
    """

    def __init__(
        self,
        table: Federation,
        parts: Assembled,
        members: FederationParts,
        ranks: ClientRanks,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(table, parts, members, ranks, report)
        self._recipe = parts.recipe
        self._workers: list[WorkerProcess] = []
        self._chosen: list[int] = []
        self._waiting: list[int] = []
        self._finished: dict[int, tuple[Message, dict[str, Tensor]]] = {}
        self._deaths = Counter[int]()
        self._round = 1

    def running(self) -> AbstractContextManager[None]:
        """Return a context in which the workers run."""
        return self._run_workers()

    @contextmanager
    def _run_workers(self) -> Iterator[None]:
        try:
            for number in range(self._table.processes):
                self._workers.append(self._start(number))
            yield
        finally:
            for worker in self._workers:
                worker.end()

    def _start(self, number: int) -> WorkerProcess:
        """Start a worker, and send it what it assembles its model from."""
        log = RunDirectory(self._recipe.run.folder).logs / f"worker-{number}.log"
        worker = WorkerProcess(number, self._table.processes, self._parts.device, log)
        recipe = self._recipe.model_dump(mode="json")
        # What it cannot receive, it tells by ending.
        worker.send({"recipe": recipe, "path": sys.path}, model_state(self._parts.model))
        return worker

    def run_round(
        self, chosen: Sequence[int], position: Position, check: Callable[[], None]
    ) -> Iterator[ClientUpdate]:
        """Train the clients of a round, several at a time.

        Args: those of `LocalCarrier.run_round`.

        Raises:
            TrainerError: a client failed, or workers died too often.
        """
        self._round = position.step // self._parts.stride + 1
        self._chosen, self._waiting = list(chosen), list(chosen)
        self._deaths.clear()
        self._policy.begin_round(self._round)
        return super().run_round(chosen, position, check)

    def train_client(
        self, client: Client, position: Position, check: Callable[[], None]
    ) -> LocalResult:
        """Wait until a worker has trained a client, and take what it ends its round with."""
        while client.number not in self._finished:
            self._assign(position, client.number)
            self._listen(check)
        self._assign(position, client.number)  # no worker waits while the server merges
        ended, tensors = self._finished.pop(client.number)
        for text in ended["reports"]:
            self._report(text)
        if ended["kind"] == "failed":
            raise read_error(ended)
        return self._take(client, ended, tensors)

    def _assign(self, position: Position, needed: int) -> None:
        """Give workers that wait a client each: one of their own, or another that is left.

        Args:
            position: the position of the run at the start of the round.
            needed: number of the client whose update comes next.
        """
        count = self._table.processes
        for worker in list(self._workers):
            # Updates that are early lie in the server's memory: not more than two for a worker.
            is_full = len(self._finished) >= 2 * count
            left = [number for number in self._waiting if number == needed or not is_full]
            if left and worker.is_ready and worker.client is None:
                place = worker.number
                # A worker reads ahead in the data of the clients that it had before.
                number = min(left, key=lambda n: (n % count != place, n))
                self._waiting.remove(number)
                worker.client = number
                if not worker.send(*self._describe(self._clients[number], position)):
                    self._replace(worker)

    def _describe(self, client: Client, position: Position) -> tuple[Message, dict[str, Tensor]]:
        """Return what a worker needs to train a client."""
        self._policy.begin(client)
        numbers, tensors = pack_client(self._parts, client)
        tensors |= name_under("global.", self._server.weights)
        tensors |= name_under("own.", client.weights)
        tensors |= name_under("buffer.", self._held.starting_for(client))
        task = {
            **numbers,
            "client": client.number,
            "last_round": client.last_round,
            "round": self._round,
            "chosen": self._chosen,
            "step": position.step,
            "schedule": asdict(position.schedule),
        }
        return task, tensors

    def _listen(self, check: Callable[[], None]) -> None:
        """Wait for messages of the workers, or for a moment."""
        check()
        ready = wait([worker.pipe for worker in self._workers], TICK_SECONDS)
        for worker in list(self._workers):
            if worker.pipe in ready:
                self._receive(worker)
            elif not worker.is_alive:
                self._replace(worker)
            elif not worker.has_stepped:
                heartbeat.touch()  # it assembles and compiles: that takes as long as it needs

    def _receive(self, worker: WorkerProcess) -> None:
        received = worker.receive()
        if received is None:
            self._replace(worker)
            return
        message, tensors = received
        if message["kind"] == "ready":
            worker.is_ready = True
        elif message["kind"] == "step":
            worker.has_stepped = True
            heartbeat.begin_step(message["step"])
        elif worker.client is None:
            raise read_error(message)
        else:
            self._finished[worker.client] = message, tensors
            worker.client = None
            if message["kind"] == "failed":  # gradients of that step may be left in its memory
                self._restart(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        """Start a worker again that has died, and let its client start the round again.

        Raises:
            TrainerError: that has happened too often.
        """
        number, how = worker.client, worker.describe_end()
        what = f"worker process {worker.number} (process {worker.pid}) {how}"
        if number is not None:
            name = self._clients[number].name
            what += f" while it trained client {name}, which starts round {self._round} again"
            self._waiting.append(number)
        self._deaths[-1 if number is None else number] += 1
        if max(self._deaths.values()) >= MOST_DEATHS:
            hint = f"see worker-{worker.number}.log in logs/ of the run; is memory short?"
            raise TrainerError(f"{what}: for the {MOST_DEATHS}th time in this round", hint)
        self._report(what)
        self._restart(worker)

    def _restart(self, worker: WorkerProcess) -> None:
        worker.end()
        self._workers.remove(worker)
        self._workers.append(self._start(worker.number))

    @torch.no_grad()
    def _take(self, client: Client, ended: Message, tensors: dict[str, Tensor]) -> LocalResult:
        """Take what a worker's model, optimizer and client hold at the end of a round."""
        self._policy.take(client, unpack_client(self._parts, client, ended, tensors))
        for name, weight in self._server.model.items():
            local(weight).copy_(tensors[f"model.{name}"])
        self._held.fill(select_under("buffer.", tensors))
        self._keep_weights(client)
        if self._experts:
            self._experts.take_tokens(select_under("tokens.", tensors))
        return replace(LocalResult(**ended["result"]), restarts=self._deaths[client.number])


def read_error(message: Message) -> TrainerError:
    """Return the error that a worker has told; one of an unknown class as a `TrainerError`."""
    kind = getattr(errors, message["error"], None)
    if not (isinstance(kind, type) and issubclass(kind, TrainerError)):
        kind = TrainerError
    return kind(message["text"], message["hint"])
