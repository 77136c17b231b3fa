"""The main module of a worker process, which trains one client at a time for the server.

    python -m trainer.engine.federated.workers.worker PIPE MEMORY PARENT

It assembles the parts of a client's plan once, and keeps nothing of a client between rounds but the
place in its data: the server sends a client's state before each round, and receives it after it. A
process that dies takes nothing along.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from ...assemble.assemble import Assembled, assemble
from ...checkpoint.state import model_state, seed_everything
from ...core.errors import TrainerError
from ...core.plugin_modules import import_plugins
from ...core.processes import die_with_parent
from ...launch.environment import World
from ...launch.group import pick_device
from ...optim.tables import ScheduleState
from ...recipe.schema import Recipe
from ...train.parts import Position
from ..carriers.client_ranks import ClientRanks
from ..carriers.local_carrier import LocalCarrier
from ..federation_parts import open_federation
from .client_message import name_under, pack_client, select_under, unpack_client
from .mailbox import Mailbox, Message


class ClientWorker:
    """Trains clients with the model and the optimizer of this process.

    Args:
        mailbox: reaches the server.
        parts: the parts of one client's plan.
    """

    def __init__(self, mailbox: Mailbox, parts: Assembled) -> None:
        table = parts.recipe.federation
        assert table is not None, "the server made sure of it"
        self._mailbox = mailbox
        self._parts = parts
        self._reports: list[str] = []
        report = self._reports.append
        # The server sends the state of the optimizer with which a client starts.
        table = table.model_copy(update={"client_optimizer": "keep"})
        self._members = open_federation(parts, table, report)
        self._carrier = LocalCarrier(table, parts, self._members, ClientRanks(), report)

    def take_reports(self) -> list[str]:
        """Return the messages to the user since the last call."""
        reports, self._reports[:] = self._reports[:], []
        return reports

    @torch.no_grad()
    def _begin(self, task: Message, tensors: dict[str, Tensor]) -> None:
        """Take the global weights, and the state of the client that trains."""
        members, client = self._members, self._members.clients[task["client"]]
        for name, weight in members.server.weights.items():
            weight.copy_(tensors[f"global.{name}"])
        client.optimizer = unpack_client(self._parts, client, task, tensors)
        client.weights = select_under("own.", tensors)
        client.buffers = select_under("buffer.", tensors)
        client.last_round = task["last_round"]
        if members.experts:
            members.experts.begin_round(task["round"], task["chosen"])
            members.experts.begin(client.number)

    def train(self, task: Message, tensors: dict[str, Tensor]) -> tuple[Message, dict[str, Tensor]]:
        """Train a client, and return what its round ends with."""
        self._begin(task, tensors)
        members, client = self._members, self._members.clients[task["client"]]
        position = Position(task["step"], schedule=ScheduleState(**task["schedule"]))
        steps = count(position.step + 1)

        def check() -> None:
            self._mailbox.send({"kind": "step", "step": next(steps)})

        result = self._carrier.train_client(client, position, check)
        numbers, state = pack_client(self._parts, client)
        state |= name_under("model.", members.server.model)
        state |= name_under("buffer.", members.held.buffers)
        if members.experts:
            state |= name_under("tokens.", members.experts.tokens)
            members.experts.end()
        sums = {"loss": result.loss, "count": result.count, "seconds": result.seconds}
        return {**numbers, "kind": "trained", "result": sums}, state


def open_worker(mailbox: Mailbox, message: Message, tensors: dict[str, Tensor]) -> ClientWorker:
    """Assemble the parts of a client's plan, with all weights of the server's model.

    Args:
        mailbox: reaches the server.
        message: the recipe, and where its plugins are found.
        tensors: parameters and saved buffers.
    """
    sys.path += [folder for folder in message["path"] if folder not in sys.path]
    import_plugins(dict.fromkeys(message["recipe"]["plugins"]["modules"]))
    recipe, world = Recipe.model_validate(message["recipe"]), World()
    seed_everything(recipe.run.seed, world.rank)
    parts = assemble(recipe, world, mailbox.device, fresh=False)
    with torch.no_grad():
        for name, tensor in model_state(parts.model).items():
            tensor.copy_(tensors[name])
    return ClientWorker(mailbox, parts)


def main(words: Sequence[str]) -> None:
    """Train the clients that the server sends, until it closes the pipe.

    Args:
        words: descriptors of pipe and memory, and the server's process number.
    """
    pipe, memory, parent = map(int, words)
    die_with_parent(parent)
    mailbox = Mailbox(Connection(pipe), memory, pick_device(World()))
    worker: ClientWorker | None = None
    with suppress(EOFError, BrokenPipeError):  # the server has ended
        while True:
            message, tensors = mailbox.receive()
            reply: Message = {"kind": "ready"}
            state: dict[str, Tensor] = {}
            try:
                if worker:
                    reply, state = worker.train(message, tensors)
                else:
                    worker = open_worker(mailbox, message, tensors)
            except BrokenPipeError:
                raise
            except Exception as error:  # whatever it is, the server must tell the user
                traceback.print_exc()
                reply = describe_error(error)
            reports = worker.take_reports() if worker else []
            mailbox.send({**reply, "reports": reports}, state)


def describe_error(error: Exception) -> Message:
    """Return an error as a message; one that was not foreseen as a plain `TrainerError`."""
    kind, text, hint = "TrainerError", f"{type(error).__name__}: {error}", ""
    if isinstance(error, TrainerError):
        # The server may lack the class of a plugin: it learns the one of ours below it.
        ours = (each for each in type(error).__mro__ if each.__module__ == TrainerError.__module__)
        kind, text, hint = next(ours).__name__, error.message, error.hint
    return {"kind": "failed", "error": kind, "text": text, "hint": hint}


if __name__ == "__main__":
    main(sys.argv[1:])
