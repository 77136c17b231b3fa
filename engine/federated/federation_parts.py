"""What every process of a federation holds: its clients, its server, and what joins the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..assemble.assemble import Assembled
from ..checkpoint.state import model_state
from ..core.errors import Problem, RecipeError
from .client import Client
from .clients import open_clients
from .experts.subsets import HeldExperts, split_experts
from .held_buffers import HeldBuffers
from .layers.masks import Masks
from .merge.geometry import Geometry
from .optimizer_policy import OptimizerPolicy
from .server.server import Server
from .tables import Federation


@dataclass(frozen=True)
class FederationParts:
    """Clients and server on this rank.

    Attributes:
        clients: all clients, in the order of their numbers.
        server: the server.
        policy: what becomes of the clients' optimizer state.
        held: the buffers that do not travel.
        experts: gives clients their experts; None: each holds all.
    """

    clients: list[Client]
    server: Server
    policy: OptimizerPolicy
    held: HeldBuffers
    experts: HeldExperts | None


def open_federation(
    parts: Assembled, table: Federation, report: Callable[[str], None]
) -> FederationParts:
    """Open the clients and the server.

    Args:
        parts: the parts of one client's plan on this rank.
        table: the recipe's `[federation]`.
        report: shows a message to the user.

    Raises:
        DataError: a source of a client cannot be read.
        RecipeError: the table does not fit the model.
    """
    clients = open_clients(parts, table, report)
    weights, buffers = _divide_tensors(parts)
    experts = _open_experts(parts, table)
    if experts:
        weights, buffers = (split_experts(parts.model, each) for each in (weights, buffers))
    averaged = buffers if table.buffers == "average" else {}
    duplicates = set(map(id, parts.parallel_model.duplicate_parameters))
    measured = {name: each for name, each in weights.items() if id(each) not in duplicates}
    holders = parts.degrees.world // parts.degrees.pipeline
    trained = dict(parts.model.named_parameters())
    frozen = [name for name, weight in trained.items() if not weight.requires_grad]
    masks = Masks(table, list(weights), frozen)
    geometry = Geometry(measured, holders, parts.device)
    server = Server(table, weights, averaged, geometry, masks)
    for client in clients:
        client.error = server.compressor.begin_errors()
    held = HeldBuffers({} if averaged else buffers, keeps=table.buffers == "local")
    names: dict[Tensor, str] = {
        weight: name if name in weights else f"{name}.0"
        for name, weight in trained.items()
        if weight.requires_grad
    }
    policy = OptimizerPolicy(table.client_optimizer, parts.optimizer, names, masks)
    return FederationParts(clients, server, policy, held, experts)


def _open_experts(parts: Assembled, table: Federation) -> HeldExperts | None:
    """Return what gives clients their experts, if the recipe says so.

    Raises:
        RecipeError: several ranks share a client.
    """
    if not table.experts.is_enabled:
        return None
    if parts.degrees.world > 1:
        message = f"{parts.degrees.world} ranks share a client, and experts need one"
        raise RecipeError([Problem(message, "federation.experts.assignment")])
    seed, balance = parts.recipe.run.seed, parts.step.balance
    return HeldExperts(table.experts, parts.model, balance, table.num_clients, seed)


def _divide_tensors(parts: Assembled) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the trained weights, and the saved buffers of floating-point numbers, by name."""
    weights = dict(parts.model.named_parameters())
    state = model_state(parts.model)
    tensors = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    trained = {name: tensors[name] for name in weights if weights[name].requires_grad}
    buffers = {name: tensor for name, tensor in tensors.items() if name not in weights}
    return trained, {name: each for name, each in buffers.items() if each.is_floating_point()}
