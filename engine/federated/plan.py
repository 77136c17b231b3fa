"""What a federation costs, before anything runs: bytes, time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch

from ..assemble.build import build_model
from ..assemble.tables import KernelChoices
from ..estimate.memory import estimate_memory
from ..recipe.schema import Recipe
from .arrivals.simulate import RoundSimulation, simulate_rounds
from .layers.masks import Masks
from .layers.tables import PARAMETERS
from .tables import Federation

BYTES = 4
"""of a number in fp32"""


@dataclass(frozen=True)
class FederationPlan:
    """The costs of a federation.

    Attributes:
        weights: numbers that clients train.
        buffers: numbers of saved buffers that are averaged.
        clients: clients of a round.
        local_steps: optimizer steps of a client in a round.
        client_sent: bytes from a client to the server in a round; of fragments the mean.
        client_received: bytes from the server to a client in a round; with compression the most,
            of a client that trained in the round before.
        data_parallel: bytes that each client would send and receive in as many steps of ordinary
            data-parallel training, by a ring all-reduce of fp32 gradients.
        transfer_seconds: time of a round's transfers over the clients' links; 0 without bandwidth.
        compute_seconds: time of a client's optimizer steps in a round; 0 if it is not given.
        client_memory: peak bytes of a rank that trains a client.
        server_memory: bytes of global weights, outer states, one tensor more, and the mean or all
            updates of a round, divided over the ranks of a client's plan.
        kept_memory: bytes that the optimizer states of the other clients, what compression has lost
            of all, and with fragments the weights of all, take where clients train in turn.
        largest_sent: bytes from a client to the server in the round of the largest fragment.
        worker_memory: bytes of a worker process: a client's rank, a copy of the global weights, and
            the memory that it shares with the server; 0: clients train where the server is.
        simulation: what simulated rounds with faults have found; None: none were asked for.
    """

    weights: int
    buffers: int
    clients: int
    local_steps: int
    client_sent: int
    client_received: int
    data_parallel: int
    transfer_seconds: float
    compute_seconds: float
    client_memory: int
    server_memory: int
    kept_memory: int
    largest_sent: int
    worker_memory: int = 0
    simulation: RoundSimulation | None = None


def plan_federation(
    recipe: Recipe,
    table: Federation,
    world: int,
    *,
    on_gpu: bool,
    bandwidth: float = 0.0,
    step_seconds: float = 0.0,
    rounds: int = 0,
) -> FederationPlan:
    """Return the costs of a recipe's federation.

    Args:
        recipe: the validated recipe.
        table: its `[federation]`.
        world: ranks of one client's plan.
        on_gpu: whether a client computes on GPUs.
        bandwidth: bits per second of each client's link, the same in both directions; 0: unknown.
        step_seconds: duration of a client's optimizer step; 0: unknown.
        rounds: rounds to simulate by `[federation.trace]`.
    """
    shapes, frozen, buffers = _trained_shapes(recipe)
    sizes = [prod(shape) for shape in shapes.values()]
    masks = Masks(table, list(shapes), frozen)
    # Fragments and schedules repeat; a thousand rounds are enough for a mean.
    numbers = range(1, min(masks.period, table.rounds or 1, 1000) + 1)
    merged = [masks.merged_in(number) for number in numbers]
    fragments = [
        [size for name in shapes if name in names for size in _sent_sizes(table, name, shapes)]
        for names in merged
    ]
    averaged = buffers if table.buffers == "average" else 0
    memory = max(estimate_memory(recipe, world, on_gpu=on_gpu), key=lambda one: one.total_bytes)
    optimizer = memory.at_peak.get("optimizer", 0)
    codec, size = table.compression.build(), table.sample_size
    out = [sum(codec.count_bytes(n) if codec else BYTES * n for n in part) for part in fragments]
    back = [
        sum(codec.count_merged_bytes(n, size) if codec else BYTES * n for n in part)
        for part in fragments
    ]
    sent = -(-sum(out) // len(out)) + averaged * BYTES
    received = -(-sum(back) // len(back)) + averaged * BYTES
    if table.client_optimizer == "schedule":
        states = {entry.state for entry in table.states} - {PARAMETERS}
        moved = BYTES * sum(
            prod(shapes[name])
            for number in numbers
            for name in shapes
            for state in states
            if masks.is_averaged(state, name, number)
        )
        sent, received = sent + moved // len(numbers), received + moved // len(numbers)
    elif table.client_optimizer == "aggregate":
        moments = optimizer * world * sum(fragments[0]) // sum(sizes)
        sent, received = sent + moments, received + moments
    steps = table.steps_of(recipe.data)
    # A ring sends and receives (C - 1) / C of the gradients twice.
    data_parallel = 4 * sum(sizes) * BYTES * steps * (table.num_clients - 1) // table.num_clients
    holds = table.merge.build() is not None or table.admission.compares
    copies = 2 + len(table.server.states) + size * holds
    kept = bool(table.compression.feedback) + table.keeps_weights
    keeps = table.client_optimizer in ("keep", "schedule") and table.carrier == "local"
    has_workers = table.processes > 1
    shared = 2 * (sum(sizes) + averaged) * BYTES + optimizer
    return FederationPlan(
        weights=sum(sizes),
        buffers=averaged,
        clients=size,
        local_steps=steps,
        client_sent=sent,
        client_received=received,
        data_parallel=data_parallel,
        transfer_seconds=(sent + received) * 8 / bandwidth if bandwidth else 0.0,
        compute_seconds=steps * step_seconds,
        client_memory=memory.total_bytes,
        server_memory=(copies * sum(sizes) + max(sizes)) * BYTES // world,
        kept_memory=optimizer * (table.num_clients - (not has_workers)) * keeps
        + kept * table.num_clients * sum(sizes) * BYTES // world,
        largest_sent=max(out) + averaged * BYTES,
        worker_memory=(memory.total_bytes + shared) * has_workers,
        simulation=simulate_rounds(table, steps, 8 * (sent + received), recipe.run.seed, rounds)
        if rounds
        else None,
    )


def _sent_sizes(table: Federation, name: str, shapes: Mapping[str, Any]) -> list[int]:
    """Return the sizes of what a client sends of a weight: of experts those that it holds."""
    shape = shapes[name]
    if not table.experts.is_enabled or ".experts." not in name:
        return [prod(shape)]
    clients = table.num_clients if table.experts.assignment == "fixed" else table.sample_size
    held = min(shape[0], ceil(shape[0] * table.experts.overlap / clients))
    return [prod(shape[1:])] * held


def _trained_shapes(recipe: Recipe) -> tuple[dict[str, Any], list[str], int]:
    """Return the shapes of trained weights, names of frozen ones, and numbers of buffers."""
    # Shapes are the same whatever computes.
    plain = recipe.model_copy(update={"kernels": KernelChoices()})
    model = build_model(plain, recipe.vocab_size, torch.device("cpu")).model
    weights = dict(model.named_parameters())
    shapes = {name: tuple(each.shape) for name, each in weights.items() if each.requires_grad}
    state = model.state_dict()
    buffers = {
        name: value
        for name, value in state.items()
        if name not in dict(model.named_parameters(remove_duplicate=False))
    }
    frozen = [name for name in weights if name not in shapes]
    return (
        shapes,
        frozen,
        sum(each.numel() for each in buffers.values() if each.is_floating_point()),
    )
