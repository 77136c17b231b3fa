"""Opens the clients of a federation: the data, random numbers and health of each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from ..assemble.assemble import Assembled
from ..assemble.training import open_training
from ..checkpoint.state import random_state, restore_random_state, seed_everything
from ..core.errors import DataError
from ..corpus.cache import cache_folder
from ..corpus.checksums import Share
from ..data.dataset import Turns
from ..data.loader import TurnLoader
from ..tasks.tables import TaskData
from ..train.health import Health
from .client import Client
from .partition.documents import DocumentShares, draw_shares
from .tables import Federation


def open_clients(
    parts: Assembled, table: Federation, report: Callable[[str], None]
) -> list[Client]:
    """Return all clients, in the order of their numbers.

    Args:
        parts: the parts of one client's plan on this rank.
        table: the recipe's `[federation]`.
        report: shows a message to the user.

    Raises:
        DataError: a source of a client cannot be read.
    """
    rank, seed = parts.world.rank, parts.recipe.run.seed
    own, clients, divided = random_state(rank), [], _divide(parts, table)
    for number in range(table.num_clients):
        # The first client continues this process's generators, as an ordinary run would.
        if number:
            seed_everything(seed, number * parts.world.world_size + rank)
        name = table.client_name(number)

        def report_client(text: str, name: str = name) -> None:
            report(f"client {name}: {text}")

        health = Health(parts.resilience, parts.device, parts.step.scale, report_client)
        loader, scale = _open_loader(parts, table, number, divided), parts.step.scale.state()
        clients.append(Client(number, name, loader, health, random_state(rank), scale))
    restore_random_state(rank, own)
    return clients


def _divide(parts: Assembled, table: Federation) -> DocumentShares | None:
    """Return what divides documents over clients, if the recipe says so."""
    if table.partition not in ("documents", "dirichlet"):
        return None
    labels, count = parts.recipe.data.labels, table.num_clients
    shares = np.full((len(labels), count), 1 / count)
    if table.partition == "dirichlet":
        shares = draw_shares(count, len(labels), table.alpha, parts.recipe.run.seed)
    by_label = dict(zip(labels, shares.tolist(), strict=True))
    return DocumentShares(by_label, parts.tokenizer, cache_folder(parts.recipe.data.cache_dir))


def _open_loader(
    parts: Assembled, table: Federation, number: int, divided: DocumentShares | None
) -> TurnLoader:
    """Return what reads a client's batches on this rank."""
    degrees, data_rank = parts.degrees, parts.plan.data_rank
    take = partial(parts.plan.take, model=parts.model)
    whole = degrees.pipeline > 1
    labels = parts.recipe.data.labels
    if (sources := table.sources_of(number, labels)) or divided:
        own = None if sources else divided
        try:
            turns = _open_sources(parts, sources or labels, table, number, own)
        except DataError as error:
            name = table.client_name(number)
            raise DataError(f"client {name}: {error.message}", error.hint) from error
        return TurnLoader(turns, data_rank, degrees.data, take, takes_whole_steps=whole)
    # One replica of an ordinary run whose global batch has the rows of all clients.
    (turn,), count = parts.data.turns, table.num_clients
    rows = turn.table.model_copy(update={"global_batch": turn.table.global_batch * count})
    turns = replace(parts.data, turns=[turn._replace(table=rows)])
    rank, ranks = number * degrees.data + data_rank, count * degrees.data
    return TurnLoader(turns, rank, ranks, take, takes_whole_steps=whole)


def _open_sources(
    parts: Assembled,
    labels: list[str],
    table: Federation,
    number: int,
    divided: DocumentShares | None,
) -> Turns:
    """Open some of the recipe's sources for one client alone.

    Args:
        parts: the parts of one client's plan on this rank.
        labels: labels of the sources.
        table: the recipe's `[federation]`.
        number: number of the client.
        divided: selects the client's documents; None: it has all.
    """
    recipe, world = parts.recipe, parts.world
    chosen = []
    for source, label in zip(recipe.data.sources, recipe.data.labels, strict=True):
        # Over all clients, the mixture of the sources is that of the recipe.
        weight = source.weight * (divided.share_of(label, number) if divided else 1.0)
        if label in labels and weight > 0:
            chosen.append(source.model_copy(update={"label": label, "weight": weight}))
    data_table = recipe.data.model_copy(update={"sources": chosen})
    share = Share(world.rank, world.world_size, world.local_rank, world.local_world_size)
    run = os.path.join(recipe.run.folder, "clients", table.client_name(number))
    data = TaskData(data_table, parts.tokenizer, recipe.run.seed, run, share, recipe.loss)
    if divided:
        data = replace(data, divide=partial(divided.select, client=number))
    (turn,) = (turns := open_training(recipe.task, data)).turns
    # Losses of sources are told apart by their place among all sources.
    train = turn.opened.train.among(recipe.data.labels)
    return replace(turns, turns=[turn._replace(opened=replace(turn.opened, train=train))])
