"""What a checkpoint keeps of a federation, beside the global weights.

Tensors are `server_STATE.WEIGHT`, `clientN_STATE.PARAMETER`, `clientN_buffer.BUFFER`,
`clientN_error.WEIGHT`, `clientN_weight.WEIGHT`, `clientN_late.WEIGHT` and
`rng.clientN.RANK.KIND`. Averaged optimizer states are `optimizer.PARAMETER.STATE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..checkpoint import state as train_state
from ..checkpoint.manifest import Manifest, TensorEntry
from ..core.errors import CheckpointError
from ..train.parts import Parts, Position
from ..train.training_state import TrainingState
from .arrivals.timeline import Timeline
from .carriers.client_ranks import ClientRanks
from .client import Client
from .held_buffers import HeldBuffers
from .optimizer_policy import OptimizerPolicy
from .server.server import Server

BUFFER, ERROR, WEIGHT, LATE = "buffer", "error", "weight", "late"
"""the sections of a client's tensors that are no optimizer states"""


class FederationState(TrainingState):
    """The states of server and clients on this rank.

    Args:
        parts: the parts of the run.
        group: a gloo group of one client's ranks; None: one process, or the default group.
        clients: all clients, in the order of their numbers.
        server: the server.
        policy: what becomes of the clients' optimizer state.
        held: the buffers that do not travel.
        ranks: the clients whose state this rank keeps.
        timeline: the simulated clock; None: all updates of a round are merged with it.
    """

    def __init__(
        self,
        parts: Parts,
        group: ProcessGroup | None,
        clients: Sequence[Client],
        server: Server,
        policy: OptimizerPolicy,
        held: HeldBuffers,
        ranks: ClientRanks,
        timeline: Timeline | None,
    ) -> None:
        super().__init__(parts, group)
        self._clients = clients
        self._own = [client for client in clients if ranks.owns(client.number)]
        self._ranks = ranks
        # Clients in jobs of their own save apart.
        self._is_alone = ranks.number is not None and ranks.peers is None
        self._saved = self._own if self._is_alone else list(clients)
        self._server = server
        self._policy = policy
        self._held = held
        self._timeline = timeline

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps."""
        tensors = self._server_tensors()
        for client in self._own:
            tensors |= self._client_tensors(client)
            tensors |= _name_random(client)
        if self._policy.shared:
            self.parts.optimizer.state = self._policy.shared
            tensors |= train_state.optimizer_state(self.parts.model, self.parts.optimizer)
        return tensors

    def _server_tensors(self) -> dict[str, Tensor]:
        return {
            f"server_{key}.{name}": tensor
            for name, states in self._server.states.items()
            for key, tensor in states.items()
        }

    def _client_tensors(self, client: Client) -> dict[str, Tensor]:
        self.parts.optimizer.state = client.optimizer
        tensors = train_state.optimizer_state(self.parts.model, self.parts.optimizer)
        named = {}
        for name, tensor in tensors.items():
            parameter, _, key = name.removeprefix("optimizer.").rpartition(".")
            named[f"client{client.number}_{key}.{parameter}"] = tensor
        sections = {BUFFER: client.buffers, ERROR: client.error, WEIGHT: client.weights}
        sections[LATE] = client.late
        for section, values in sections.items():
            for name, tensor in values.items():
                named[f"client{client.number}_{section}.{name}"] = tensor
        return named

    def numbers(self, position: Position) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps; JSON."""
        clients = []
        for client in self._own:
            self.parts.optimizer.state = client.optimizer
            clients.append(
                {
                    "name": client.name,
                    "batch": client.batch,
                    "last_round": client.last_round,
                    "late_weight": client.late_weight,
                    "loss_scale": client.loss_scale,
                    "health": client.health.state(),
                    "optimizer_numbers": self.optimizer_numbers(),
                }
            )
        self.parts.optimizer.state = self._policy.shared
        numbers = self.optimizer_numbers()
        finished = position.step // self.parts.stride
        return {
            "optimizer_numbers": numbers,
            "federation": {
                "round": finished,
                "clients": [each for own in self._ranks.gather(clients) for each in own],
                "merged_bytes": self._server.merged_bytes,
                "timeline": self._timeline.state() if self._timeline else None,
            },
        }

    def prepare(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint fills, in place."""
        saved, rank = manifest.extra["federation"]["clients"], self.parts.world.rank
        names = [each["name"] for each in saved]
        if len(names) != len(self._saved) or (self._is_alone and names != [self._own[0].name]):
            message = f"the checkpoint has the clients {', '.join(names)}, the run other ones"
            raise CheckpointError(message, "start a new run with run.init_from")
        tensors = self._server_tensors()
        self.parts.optimizer.state = self._policy.shared
        self._prepare_optimizer(manifest.tensors, manifest.extra["optimizer_numbers"])
        tensors |= train_state.optimizer_state(self.parts.model, self.parts.optimizer)
        for client, numbers in zip(self._saved, saved, strict=True):
            if client not in self._own:
                continue
            prefix, own = f"client{client.number}_", dict[str, TensorEntry]()
            for name, entry in manifest.tensors.items():
                key, _, parameter = name.removeprefix(prefix).partition(".")
                kept = {f"{prefix}{WEIGHT}": client.weights, f"{prefix}{LATE}": client.late}
                section = name.removesuffix(f".{parameter}")
                if section in kept:
                    kept[section][parameter] = torch.empty_like(self._server.weights[parameter])
                elif name.startswith(prefix) and key not in (BUFFER, ERROR):
                    own[f"optimizer.{parameter}.{key}"] = entry
            self.parts.optimizer.state = client.optimizer
            self._prepare_optimizer(own, numbers["optimizer_numbers"])
            of_client = self._client_tensors(client)
            # A client that starts again has lost nothing yet.
            lost = f"{prefix}{ERROR}."
            tensors |= {
                name: tensor
                for name, tensor in of_client.items()
                if name in manifest.tensors or not name.startswith(lost)
            }
            if rank < manifest.world:
                tensors |= _name_random(client)
        return tensors

    def _prepare_optimizer(self, saved: dict[str, TensorEntry], numbers: dict[str, float]) -> None:
        train_state.prepare_optimizer(self.parts.model, self.parts.optimizer, saved, numbers)

    def restore(self, manifest: Manifest, filled: dict[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        self._server.take_weights()
        self._held.take_initial()
        saved = manifest.extra["federation"]
        self._server.merged_bytes = saved["merged_bytes"]
        if self._timeline and saved.get("timeline"):
            self._timeline.restore(saved["timeline"])
        for client, numbers in zip(self._saved, saved["clients"], strict=True):
            client.batch, client.loss_scale = numbers["batch"], numbers["loss_scale"]
            client.last_round = numbers["last_round"]
            client.late_weight = numbers.get("late_weight", 0.0)
            client.health.restore(numbers["health"])


def _name_random(client: Client) -> dict[str, Tensor]:
    return {
        name.replace("rng.", f"rng.client{client.number}.", 1): tensor
        for name, tensor in client.random.items()
    }
