"""Runs a recipe with `[federation]`: what `trainer federate run` does with an ordinary session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..assemble.assemble import Assembled
from ..checkpoint.manifest import SaveInfo
from ..checkpoint.store import CheckpointStore
from ..core.errors import Problem, RecipeError
from ..launch.signals import StopFlag
from ..observe.observer import Observer
from ..recipe.schema import Recipe
from ..run.run_loop import RunLoop
from ..train.evaluate import Tasks
from ..train.health import Health
from ..train.loop import Outcome
from ..train.parts import Position
from ..train.saving import Saver
from .arrivals.timeline import Timeline
from .arrivals.trace import ClientTrace
from .carriers.client_ranks import ClientRanks, divide_job
from .elastic.replica import Replica
from .federation_parts import open_federation
from .federation_state import FederationState
from .rounds import Rounds
from .server.server import Server
from .tables import Federation, carriers


@dataclass
class FederatedLoop(RunLoop):
    """Trains in rounds.

    Args:
        is_job: whether it is the loop of `trainer run`, whose replica groups are the clients.
    """

    is_job: bool = False

    rounds: Rounds | None = None
    """of the attempt, once its saver was opened"""

    def require(self, recipe: Recipe) -> None:
        """Refuse a recipe that this loop does not train.

        Raises:
            RecipeError: it has no `[federation]`.
        """
        if not recipe.federation:
            message = "the recipe has no such table"
            hint = "give one, or run it with `trainer run`"
            raise RecipeError([Problem(message, key="federation", hint=hint)])

    def adapt(self, recipe: Recipe) -> Recipe:
        """Return the recipe of one client, whose plan and batch are those of a replica group."""
        table, data = recipe.federation, recipe.data
        if not self.is_job or table is None:
            return recipe
        count = recipe.parallel.replicate
        share = data.model_copy(update={"global_batch": data.global_batch // count})
        rounds = (recipe.run.steps or 0) // table.steps_of(share)
        changes = {
            "federation": table.model_copy(update={"clients": count, "rounds": rounds}),
            "parallel": recipe.parallel.model_copy(update={"replicate": 1}),
            "data": share,
        }
        return recipe.model_copy(update=changes)

    def num_parts(self, recipe: Recipe) -> int:
        """Return into how many parts the ranks are divided: one for each client, or 1."""
        table = self.adapt(recipe).federation
        assert table is not None, "`require` made sure of it"
        return carriers[table.carrier].model_validate({}).num_parts(table)

    def open_saver(
        self,
        store: CheckpointStore,
        parts: Assembled,
        health: Health,
        identity: SaveInfo,
        report: Callable[[str], None],
    ) -> Saver:
        """Open the clients and the server, and return what saves and restores them."""
        recipe, table = parts.recipe, parts.recipe.federation
        assert table is not None, "`require` made sure of it"
        config = carriers[table.carrier].model_validate({})
        build_carrier = config.build(table)  # before the clients: it may refuse the recipe
        members = open_federation(parts, table, report)
        clients, server = members.clients, members.server
        ranks = ClientRanks()
        if table.is_elastic:
            ranks = ClientRanks(Replica.find(table.num_clients).number)
        elif store.group and config.num_parts(table) > 1:
            timeout = recipe.resilience.collective_timeout_seconds
            ranks = divide_job(store.group, table.num_clients, timeout)
        carrier = build_carrier(table, parts, members, ranks, report)
        seed, interval = recipe.run.seed, recipe.ema.interval
        timeline = _open_timeline(table, parts, server)
        self.rounds = Rounds(
            table, seed, parts, clients, server, carrier, timeline, interval, report
        )
        group = None if ranks.peers else store.group
        policy, held = members.policy, members.held
        state = FederationState(parts, group, clients, server, policy, held, ranks, timeline)
        return Saver(store, parts, health, identity, report, state)

    def train(
        self,
        parts: Assembled,
        position: Position,
        saver: Saver,
        health: Health,
        observer: Observer,
        stop: StopFlag,
        tasks: Tasks,
    ) -> Outcome:
        """Train from a position to the last round; see `Rounds.train`."""
        assert self.rounds is not None, "`open_saver` comes first"
        with self.rounds.carrier.running():
            return self.rounds.train(position, saver, health, observer, stop, tasks)


def _open_timeline(table: Federation, parts: Assembled, server: Server) -> Timeline | None:
    """Return the simulated clock, if the recipe asks for one."""
    if not table.simulates_time:
        return None
    codec, size = table.compression.build(), table.sample_size
    counts = [weight.numel() for weight in server.weights.values()]
    sent = sum(codec.count_bytes(each) if codec else 4 * each for each in counts)
    received = sum(codec.count_merged_bytes(n, size) if codec else 4 * n for n in counts)
    names = [table.client_name(number) for number in range(table.num_clients)]
    bits, seed = 8 * (sent + received), parts.recipe.run.seed
    trace = ClientTrace(table.trace, table.num_clients, parts.stride, bits, seed, names)
    return Timeline(table.late, table.trace, trace)
