"""A client: its data, its optimizer state, and its optimizer steps of a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.state import random_state, restore_random_state
from ..core import faults
from ..core.heartbeat import heartbeat
from ..data.batch import Batch
from ..data.loader import TurnLoader
from ..train.health import Health
from ..train.parts import Parts, Position


@dataclass
class Client:
    """A client between two of its rounds.

    Attributes:
        number: number of the client, counted from 0.
        name: what metrics and messages call it.
        loader: reads its batches.
        health: examines its steps.
        random: the states of its generators of random numbers on this rank.
        loss_scale: the state of its loss scale.
        batch: batches that it has read: its place in its data.
        optimizer: its optimizer state: a dict for each parameter.
        buffers: the buffers that it keeps between rounds, by name.
        error: what the compression has lost of its pseudo-gradients, by weight.
        weights: the weights with which it ended its last round, where it keeps its own.
        late: its update that a later round merges, by weight; nothing without one.
        late_weight: weight of that update in the mean.
        last_round: number of the round in which it trained last; 0: it has not.
    """

    number: int
    name: str
    loader: TurnLoader
    health: Health
    random: dict[str, Tensor]
    loss_scale: dict[str, float]
    batch: int = 0
    optimizer: defaultdict[Any, Any] = field(default_factory=lambda: defaultdict(dict))
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    late: dict[str, Tensor] = field(default_factory=dict)
    late_weight: float = 0.0
    last_round: int = 0
    _batches: Iterator[list[Batch]] | None = None

    def seek(self, batch: int) -> None:
        """Continue after so many batches."""
        if batch != self.batch:
            self.batch, self._batches = batch, None

    def next_batch(self) -> list[Batch]:
        """Return the micro batches of the next step on this rank."""
        if self._batches is None:
            self._batches = self.loader.steps(self.batch)
        self.batch += 1
        return next(self._batches)


@dataclass(frozen=True)
class LocalResult:
    """The numbers of a client's round.

    Attributes:
        loss: training loss, the mean over what the task counts.
        count: units of the task, such as tokens, that it trained on.
        seconds: duration of its training.
        restarts: how often it began again because the process that trained it died.
    """

    loss: float
    count: int
    seconds: float
    restarts: int = 0


def train_locally(
    parts: Parts, client: Client, position: Position, before_step: Callable[[int], None]
) -> LocalResult:
    """Run a client's optimizer steps of a round; the model begins with the global weights.

    Learning rates follow the steps of the server, so that all clients are at the same point.

    Args:
        parts: the parts of the run; the model and the optimizer's state are the client's now.
        client: the client; its place in the data is kept up to date.
        position: the position of the run at the start of the round.
        before_step: called before each step with the number of finished steps of the round; what it
            raises ends the round.

    Raises:
        Diverged: the loss or the gradient is not finite, and the policy is to stop.
    """
    start, step, rank = perf_counter(), parts.step, parts.world.rank
    restore_random_state(rank, client.random)
    step.scale.restore(client.loss_scale)
    sums = torch.zeros(2, dtype=torch.float32, device=parts.device)
    for done in range(position.step, position.step + parts.stride):
        heartbeat.begin_step(done + 1)
        before_step(done - position.step)
        batch = client.next_batch()
        factor = parts.schedule.lr_factor(done, parts.total_steps) * position.schedule.ratio
        faults.point("train.step", rank, done + 1)
        if parts.schedule.changes_momentum:
            step.set_momentum(partial(parts.schedule.momentum, done, parts.total_steps))
        gradients = step.accumulate(batch, factor)
        lr = parts.peak_lr * factor
        if client.health.should_step(gradients, done + 1, client.batch, lr):
            step.update(factor)
        step.clear()
        sums += torch.stack([gradients.loss.float() * gradients.count, gradients.count.float()])
    client.health.verify()
    client.random, client.loss_scale = random_state(rank), step.scale.state()
    total, count = sums.tolist()  # waits for the device
    return LocalResult(total / max(count, 1), int(count), perf_counter() - start)
