"""What `[federation]` asks of the other tables, and of its own keys together."""

from __future__ import annotations

from collections.abc import Iterator

from ...core.errors import nearest
from ...core.text.display import format_value
from ...core.text.tree import Finding
from ..schema import Recipe


def check_federation(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit federated training; nothing for an ordinary run."""
    table = recipe.federation
    if table is None:
        return
    yield from _check_job(recipe) if table.is_job else _check_counts(recipe)
    yield from _check_processes(recipe)
    yield from _check_clients(recipe)
    yield from _check_fragments(recipe)
    yield from _check_layers(recipe)
    for key in ("steps", "epochs"):
        if getattr(recipe.run, key) is not None and not table.is_job:
            message = "is given beside [federation], whose rounds say how long to train"
            yield ("run", key), message, "leave it out"
    unsupported = {
        ("data", "splits"): bool(recipe.data.splits),
        ("precision", "parameters"): recipe.precision.parameters != "fp32",
        ("resilience", "non_finite"): recipe.resilience.non_finite == "rollback",
        ("resilience", "spike"): recipe.resilience.spike == "rollback",
        ("profile", "steps"): recipe.profile.steps > 0,
        ("metrics", "monitors"): bool(recipe.metrics.monitors),
        ("ema", "nesterov", "scale"): recipe.ema.nesterov.scale > 0,
        ("ema", "last_steps"): recipe.ema.last_steps > 0,
        ("optimizer", "name"): recipe.optimizer.averages_weights,
    }
    for path, is_given in unsupported.items():
        if is_given:
            yield path, "is unsupported together with [federation]", "leave it out"
    for name, is_given in {
        "merge": table.merge.name != "mean",
        "compression": table.compression.name != "none",
        "admission": table.admission.compares,
        "late": table.simulates_time,
    }.items():
        if is_given and table.averages_states:
            message = f'is unsupported with client_optimizer = "{table.client_optimizer}"'
            yield ("federation", name), message, '"keep" or "reset" the states'
    if table.averages_states and recipe.optimizer.has_state_in_int8:
        policy = f'federation.client_optimizer = "{table.client_optimizer}"'
        message = f'"int8" is unsupported with {policy}'
        yield ("optimizer", "state_dtype"), message, 'take "bf16" or "fp32"'
    if table.averages_states and recipe.optimizer.has_owned_state:
        message = f'a mean of the states of "{recipe.optimizer.name}" is no state'
        yield ("federation", "client_optimizer"), message, '"keep" or "reset" the states'
    for key, is_given in {
        "client_optimizer": table.averages_states,
        "experts": table.experts.is_enabled,
        "layers": any(layer.policy != "freeze" for layer in table.layers),
        "states": bool(table.states),
        "late": table.simulates_time,
    }.items():
        if is_given and table.carrier in ("torchrun", "job", "elastic"):
            message = f'is unsupported with carrier = "{table.carrier}"'
            yield ("federation", key), message, 'use carrier = "local"'
    for index, source in enumerate(recipe.data.sources):
        if getattr(source, "streaming", False):
            where = ("data", "sources", index, "streaming")
            yield where, "is unsupported together with [federation]", "prepare the source once"


def count_job_ranks(recipe: Recipe, world: int | None) -> int | None:
    """Return the number of ranks that `[parallel]` describes.

    Args:
        recipe: tables that are each valid alone.
        world: number of ranks of the process group; None: unknown.
    """
    table = recipe.federation
    is_part = world is not None and table is not None and table.is_elastic
    return world * recipe.parallel.replicate if world and is_part else world


def _check_counts(recipe: Recipe) -> Iterator[Finding]:
    """Yield the keys that exclude one another, and numbers that do not fit."""
    table = recipe.federation
    assert table is not None
    for path, given, words in (
        ("clients", [table.clients, table.client or None], "clients or [[federation.client]]"),
        ("local_steps", [table.local_steps, table.local_tokens], "local_steps or local_tokens"),
        ("rounds", [table.rounds], "how long to train"),
    ):
        count = sum(each is not None for each in given)
        if count != 1:
            message = "is missing" if count == 0 else "is given twice"
            hint = "" if len(given) == 1 else "give one of the two"
            yield ("federation", path), f"{message}: {words}", hint
    size = table.clients_per_round
    if size is not None and size > table.num_clients > 0:
        message = f"clients_per_round ({size}) is more than the {table.num_clients} clients"
        yield ("federation", "clients_per_round"), message, f"at most {table.num_clients}"
    quorum = table.late.quorum
    if quorum is not None and quorum > table.sample_size > 0:
        message = f"quorum ({quorum}) is more than the {table.sample_size} clients of a round"
        yield ("federation", "late", "quorum"), message, f"at most {table.sample_size}"
    if table.local_tokens is not None and recipe.task.unit != "tokens":
        message = f'the task "{recipe.task.name}" does not count tokens'
        yield ("federation", "local_tokens"), message, "give local_steps"


def _check_processes(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit clients that train in worker processes."""
    table, ranks = recipe.federation, recipe.parallel.degrees.known.world
    assert table is not None
    if table.processes == 1:
        return
    path = ("federation", "processes")
    if table.carrier != "local":
        message = f'is unsupported with carrier = "{table.carrier}"'
        yield path, message, 'use carrier = "local"'
    elif ranks > 1:
        message = f"is unsupported with {ranks} ranks a client, as [parallel] says"
        yield path, message, 'carrier = "torchrun" trains such clients at once'
    elif table.processes > table.sample_size > 0:
        message = f"({table.processes}) is more than the {table.sample_size} clients of a round"
        yield path, message, f"at most {table.sample_size}"
    if recipe.parallel.fsdp.offload:
        yield ("parallel", "fsdp", "offload"), "is unsupported with federation.processes", ""


def _check_layers(recipe: Recipe) -> Iterator[Finding]:
    """Yield schedules that nothing follows, and keys of policies that have none."""
    table = recipe.federation
    assert table is not None
    is_scheduled = table.client_optimizer == "schedule"
    states = [entry.state for entry in table.states]
    if is_scheduled and all(state == "parameters" for state in states):
        message = 'is "schedule", and no entry of [[federation.states]] names a state'
        yield ("federation", "client_optimizer"), message, 'such as state = "exp_avg"'
    for index, state in enumerate(states):
        if state != "parameters" and not is_scheduled:
            message = f"{format_value(state)} is averaged by a schedule"
            hint = 'set federation.client_optimizer = "schedule"'
            yield ("federation", "states", index, "state"), message, hint
    if table.experts.is_enabled:
        for key, is_given in {
            "merge": table.merge.name != "mean",
            "admission": table.admission.compares,
            "late": table.simulates_time,
            "fragments": table.fragments.is_enabled,
            "layers": bool(table.layers),
            "states": bool(table.states),
        }.items():
            if is_given:
                yield ("federation", key), "is unsupported with [federation.experts]", ""
        if getattr(getattr(recipe.model, "moe", None), "groups", 1) > 1:
            message = "is unsupported with routing by groups (model.moe.groups)"
            yield ("federation", "experts"), message, ""
    if table.keeps_weights and recipe.parallel.pipeline != 1 and not table.fragments.is_enabled:
        message = "clients keep weights between rounds, which is unsupported with parallel.pipeline"
        yield ("federation", "states" if states else "layers"), message, ""
    if any(layer.policy == "random" for layer in table.layers) and recipe.lora.rank:
        yield ("federation", "layers"), '"random" is unsupported with [lora]', ""


def _check_job(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit clients that are the replica groups of an ordinary run."""
    table, steps, replicas = recipe.federation, recipe.run.steps, recipe.parallel.replicate
    assert table is not None
    carrier = f'carrier = "{table.carrier}"'
    given = {
        "clients": table.clients,
        "client": table.client,
        "clients_per_round": table.clients_per_round,
        "dropout": table.dropout,
        "rounds": table.rounds,
    }
    for key, value in given.items():
        if value:
            message = f"is unsupported with {carrier}"
            hint = "parallel.replicate is the number of clients, run.steps says how long to train"
            yield ("federation", key), message, hint
    if table.partition != "rows":
        message = f"is unsupported with {carrier}"
        yield ("federation", "partition"), message, "replica groups share the rows of a run"
    if replicas < 2:
        message = f"is {replicas}, but {carrier} makes its groups the clients"
        yield ("parallel", "replicate"), message, "give the number of clients, 2 or more"
    if table.local_steps is None or table.local_tokens is not None:
        yield ("federation", "local_steps"), "is missing: steps between two exchanges", ""
    elif steps is None:
        yield ("run", "steps"), f"is missing: {carrier} counts steps", "give it, not epochs"
    elif steps % table.local_steps:
        message = f"({steps}) is no multiple of federation.local_steps ({table.local_steps})"
        yield ("run", "steps"), message, f"such as {-(-steps // table.local_steps)} * local_steps"
    if table.is_elastic:
        if table.fragments.is_enabled:
            yield ("federation", "fragments"), f"is unsupported with {carrier}", 'take "job"'
        if 1 < replicas < table.elastic.min_replicas:
            message = f"({table.elastic.min_replicas}) is more than the {replicas} replica groups"
            yield ("federation", "elastic", "min_replicas"), message, f"at most {replicas}"


def _check_fragments(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit clients that keep weights of their own between rounds."""
    table = recipe.federation
    assert table is not None
    if not table.fragments.is_enabled:
        return
    if table.sample_size < table.num_clients or table.dropout or table.simulates_time:
        message = "all clients must train in each round"
        yield (
            ("federation", "fragments"),
            message,
            "leave out clients_per_round, dropout, late and trace",
        )
    if table.client_optimizer == "aggregate":
        message = 'is unsupported with client_optimizer = "aggregate"'
        yield ("federation", "fragments"), message, '"keep" or "reset" the states'
    if recipe.parallel.pipeline != 1:
        yield ("federation", "fragments"), "is unsupported with parallel.pipeline", ""
    steps = table.steps_of(recipe.data)
    if table.fragments.delay >= steps:
        message = f"delay ({table.fragments.delay}) is not less than the {steps} steps of a round"
        yield ("federation", "fragments", "delay"), message, f"at most {steps - 1}"


def _check_clients(recipe: Recipe) -> Iterator[Finding]:
    """Yield what is wrong with the clients' names and sources."""
    table, labels = recipe.federation, recipe.data.labels
    assert table is not None
    names = [client.name for client in table.client]
    for index, client in enumerate(table.client):
        path = ("federation", "client", index)
        if client.name in names[:index]:
            yield (*path, "name"), f"two clients are named {format_value(client.name)}", ""
        for place, label in enumerate(client.sources):
            if label not in labels:
                hint = nearest(label, labels) or f"known: {', '.join(labels)}"
                message = f"no source of [data] has the label {format_value(label)}"
                yield (*path, "sources", place), message, hint
    divides = table.partition in ("documents", "dirichlet")
    if divides and recipe.task.name != "language_modeling":
        message = f'the task "{recipe.task.name}" has records, which are not divided by documents'
        yield ("federation", "partition"), message, '"rows" or "sources"'
    owns = table.partition != "rows" or any(client.sources for client in table.client)
    if owns and recipe.task.find_outputs(recipe.loss) is not None:
        message = "outputs on disk are in the order of all sources"
        yield ("federation", "partition"), message, 'partition = "rows" can read them'
    if table.partition == "sources" and table.num_clients > len(labels):
        message = f"{table.num_clients} clients have {len(labels)} sources"
        yield ("federation", "partition"), message, 'give more data.sources, or partition = "rows"'
