"""The rounds of federated training: what happens, in order."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from ..core.errors import ExitCode, Stopped
from ..launch.signals import StopFlag, StopRequested
from ..observe.observer import Observer
from ..parallel.materialize import draw_weights
from ..train.average import reshard
from ..train.evaluate import Tasks
from ..train.health import Health
from ..train.loop import Outcome, evaluate_and_save, evaluate_splits, save_and_stop
from ..train.parts import Parts, Position
from ..train.saving import Saver
from .arrivals.timeline import RoundTiming, Timeline
from .carriers.local_carrier import ClientUpdate, LocalCarrier
from .client import Client
from .round_lost import RoundLost
from .sampler import sample_clients
from .server.server import Server
from .tables import Federation


@dataclass(frozen=True)
class Rounds:
    """Federated training on this rank.

    Attributes:
        table: the recipe's `[federation]`.
        seed: the recipe's `run.seed`.
        parts: the parts of one client's plan.
        clients: all clients, in the order of their numbers.
        server: the server.
        carrier: trains the clients of a round.
        timeline: the simulated clock; None: all updates of a round are merged with it.
        ema_interval: optimizer steps between updates of the average of the global weights.
        report: tells the user which update was rejected.
    """

    table: Federation
    seed: int
    parts: Parts
    clients: Sequence[Client]
    server: Server
    carrier: LocalCarrier
    timeline: Timeline | None
    ema_interval: int
    report: Callable[[str], None]

    def train(
        self,
        position: Position,
        saver: Saver,
        health: Health,
        observer: Observer,
        stop: StopFlag,
        tasks: Tasks,
    ) -> Outcome:
        """Train from a position to the last round, or until evaluations or a signal say to stop.

        A signal waits for the end of the round, or, if the round before is saved, for the end of
        the step: a round is complete or it has not been.

        Args: those of `train.loop.train`.

        Returns:
            how training ended.

        Raises:
            Diverged: training diverged, and the policies of `[resilience]` say to stop.
            CheckpointError: a checkpoint could not be written.
            Stopped: a signal came before there was anything to save.
        """
        parts, total = self.parts, self.parts.total_steps
        # An attempt that was killed before it saved a round has left its first evaluation behind.
        is_new = position.step == 0 and not saver.is_saved(0)
        is_evaluated = not (is_new or position.unevaluated)
        observer.start(position.step, int(position.count), is_evaluated=is_evaluated)
        outcome: Outcome | None = None
        if position.unevaluated:
            outcome = evaluate_and_save(parts, position, saver, observer, health, stop, tasks)
        elif is_new and parts.splits:
            self._evaluate_initial(position, observer, health, stop)
        while outcome is None and position.step < total:
            if stop.agree():
                return save_and_stop(parts, position, saver, observer)
            saver.wait_staged()  # a save in the background may still be copying the weights
            try:
                if self.carrier.catch_up(position, partial(self._check, position, saver, stop)):
                    observer.start(position.step, int(position.count))
                self._train_round(position, saver, observer, stop)
            except StopRequested:
                return "stopped"
            except RoundLost:
                reshard(parts.model)
                self.server.broadcast()
                continue
            stop.defer()
            outcome = evaluate_and_save(parts, position, saver, observer, health, stop, tasks)
            if parts.gc_interval:
                gc.collect(1)
        return outcome or "finished"

    def _evaluate_initial(
        self, position: Position, observer: Observer, health: Health, stop: StopFlag
    ) -> None:
        """Evaluate the weights that a new run begins with.

        Raises:
            Stopped: a signal came meanwhile, and there is nothing to save.
        """
        try:
            evaluate_splits(self.parts, position, observer, health, stop, self.parts.splits, None)
        except StopRequested:
            raise Stopped(ExitCode.INTERRUPTED) from None

    def _train_round(
        self, position: Position, saver: Saver, observer: Observer, stop: StopFlag
    ) -> None:
        """Train the clients of a round, apply the server optimizer and record the rows."""
        check = partial(self._check, position, saver, stop)
        parts, start = self.parts, perf_counter()
        number, end = position.step // parts.stride + 1, position.step + parts.stride
        chosen = sample_clients(self.table, self.seed, number)
        timing = self.timeline.run_round(number, chosen) if self.timeline else None
        if timing:
            chosen, merged = timing.trained, [(each.client, each.round) for each in timing.merged]
            self.server.begin_round(number, [c for c in chosen if (c, number) not in merged])
        else:
            self.server.begin_round(number)
        self._draw_again(number)
        log = _RoundLog(number, end, timing)
        for update in self.carrier.run_round(chosen, position, check):
            log.updates.append(update)
            if not self.server.holds_updates:
                observer.on_row(log.describe(update))
        merging = perf_counter()
        self._receive_late(timing, number)
        self.server.step(number)
        for update in log.updates if self.server.holds_updates else ():
            observer.on_row(log.describe(update))
        for client, reason in log.rejected:
            self.report(f"round {number}: client {client.name} was rejected: {reason}")
        self.server.broadcast()
        reshard(parts.model)
        self._average(position.step, end)
        position.step = end
        position.batch += parts.stride * len(log.updates)
        position.count = int(position.count) + log.count
        seconds = perf_counter() - start
        row = log.summarize()
        row |= {"pseudo_gradient_norm": self.server.merged_norm}
        if self.table.merge.name == "mean" and not timing:
            row |= log.estimate_noise(self.server.merged_norm)
        unit = parts.step.task.unit
        row |= {
            "server_seconds": perf_counter() - merging,
            "seconds": seconds,
            "step_seconds": seconds / parts.stride,
        }
        row |= {unit: position.count, f"{unit}_per_second": log.count / seconds}
        row["samples"] = parts.loader.turns.count_samples(position.batch)
        observer.on_row(row)

    def _check(self, position: Position, saver: Saver, stop: StopFlag) -> None:
        """End a round before its end if a signal asks to, and the round before is saved."""
        if self.carrier.wants_stop(stop) and saver.is_saved(position.step):
            raise StopRequested

    def _receive_late(self, timing: RoundTiming | None, number: int) -> None:
        """Give the server the updates of earlier rounds that arrive in a round."""
        for flight in timing.merged if timing else ():
            if flight.round < number:
                factor = self.table.late.weigh(number - flight.round)
                self.server.receive_late(self.clients[flight.client], factor)

    def _draw_again(self, number: int) -> None:
        """Draw the weights that a round begins with anew, on the server and for all clients."""
        names = self.server.masks.drawn_before(number)
        if names:
            reshard(self.parts.model)
            draw_weights(self.parts.model, names, f"{self.seed}:round {number}")
            self.server.restart(names)
            self.carrier.forget(names)

    def _average(self, before: int, after: int) -> None:
        """Update the average of the global weights if that is due in a round."""
        if self.parts.average and after // self.ema_interval > before // self.ema_interval:
            self.parts.average.update(0)  # every interval is due at step 0


@dataclass
class _RoundLog:
    """Collects the updates of a round, for its rows of metrics.jsonl.

    Attributes:
        number: number of the round, counted from 1.
        step: optimizer steps that a client has finished at the end of the round.
        timing: what happened by the simulated clock, if there is one.
    """

    number: int
    step: int
    timing: RoundTiming | None = None
    updates: list[ClientUpdate] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Units of the task that the clients trained on."""
        return sum(update.result.count for update in self.updates)

    @property
    def rejected(self) -> list[tuple[Client, str]]:
        """The clients whose update was not merged, each with the reason."""
        arrivals = [update.arrival for update in self.updates]
        return [(each.client, each.rejected) for each in arrivals if each.rejected]

    def describe(self, update: ClientUpdate) -> dict[str, Any]:
        """Return what metrics.jsonl says of a client's round."""
        arrival = update.arrival
        reason: dict[str, Any] = {"rejected": arrival.rejected} if arrival.rejected else {}
        reason |= {"late": True} if arrival.is_late else {}
        reason |= {"restarts": update.result.restarts} if update.result.restarts else {}
        return {
            "kind": "client",
            "step": self.step,
            "round": self.number,
            "client": arrival.client.name,
            "loss": update.result.loss,
            "weight": arrival.weight,
            "norm": arrival.norm,
            "bytes_sent": update.bytes_sent,
            "bytes_received": update.bytes_received,
            "seconds": update.result.seconds,
            **reason,
            **{f"cosine/{name}": cosine for name, cosine in arrival.cosines.items()},
        }

    def estimate_noise(self, mean_norm: float) -> dict[str, float]:
        """Return the noise scale of pseudo-gradients, in clients; nothing for less than two.

        With independent clients, E |g_c|^2 = |G|^2 + S, and of a mean with weights p that add up to
        1, E |g|^2 = |G|^2 + S sum(p^2). The scale is S / |G|^2 (McCandlish et al. 2018,
        arXiv:1812.06162, appendix A, with clients in the place of batches).

        Args:
            mean_norm: L2 norm of the merged pseudo-gradient.
        """
        merged = [update.arrival for update in self.updates if not update.arrival.rejected]
        total = sum(arrival.weight for arrival in merged)
        if len(merged) < 2 or not total:
            return {}
        shares = [arrival.weight / total for arrival in merged]
        squares = sum(p * each.norm**2 for p, each in zip(shares, merged, strict=True))
        overlap = sum(p**2 for p in shares)
        noise = squares - mean_norm**2
        signal = mean_norm**2 - overlap * squares
        return {"noise_scale": noise / signal} if signal > 0 else {}

    def summarize(self) -> dict[str, Any]:
        """Return what metrics.jsonl says of the round."""
        merged = [update for update in self.updates if not update.arrival.rejected]
        weights = [update.arrival.weight for update in merged]
        losses = [update.result.loss for update in merged]
        total = sum(weights)
        loss = sum(w * x for w, x in zip(weights, losses, strict=True)) / total if total else 0.0
        times = {}
        if timing := self.timing:
            times = {
                "merged": len(timing.merged),
                "merged_late": sum(flight.round < self.number for flight in timing.merged),
                "dropped": len(timing.dropped),
                "failed": len(timing.failed),
                "simulated_seconds": timing.seconds,
            }
        return {
            "kind": "round",
            "step": self.step,
            "round": self.number,
            "loss": loss,
            "clients": len(merged),
            "rejected": len(self.updates) - len(merged),
            "bytes_sent": sum(update.bytes_sent for update in self.updates),
            "bytes_received": sum(update.bytes_received for update in self.updates),
            "train_seconds": sum(update.result.seconds for update in self.updates),
            **times,
        }
