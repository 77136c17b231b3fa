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
    yield from _check_counts(recipe)
    yield from _check_clients(recipe)
    yield from _check_fragments(recipe)
    for key in ("steps", "epochs"):
        if getattr(recipe.run, key) is not None:
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
    }.items():
        if is_given and table.client_optimizer == "aggregate":
            message = 'is unsupported with client_optimizer = "aggregate"'
            yield ("federation", name), message, '"keep" or "reset" the states'
    if table.client_optimizer == "aggregate" and recipe.optimizer.has_state_in_int8:
        message = '"int8" is unsupported with federation.client_optimizer = "aggregate"'
        yield ("optimizer", "state_dtype"), message, 'take "bf16" or "fp32"'
    if recipe.optimizer.has_owned_state and table.client_optimizer == "aggregate":
        message = f'a mean of the states of "{recipe.optimizer.name}" is no state'
        yield ("federation", "client_optimizer"), message, '"keep" or "reset" the states'
    for index, source in enumerate(recipe.data.sources):
        if getattr(source, "streaming", False):
            where = ("data", "sources", index, "streaming")
            yield where, "is unsupported together with [federation]", "prepare the source once"


def _check_counts(recipe: Recipe) -> Iterator[Finding]:
    """Yield the keys that exclude one another, and numbers that do not fit."""
    table = recipe.federation
    assert table is not None
    for path, given, words in (
        ("clients", [table.clients, table.client or None], "clients or [[federation.client]]"),
        ("local_steps", [table.local_steps, table.local_tokens], "local_steps or local_tokens"),
    ):
        count = sum(each is not None for each in given)
        if count != 1:
            message = "is missing" if count == 0 else "is given twice"
            yield ("federation", path), f"{message}: {words}", "give one of the two"
    size = table.clients_per_round
    if size is not None and size > table.num_clients > 0:
        message = f"clients_per_round ({size}) is more than the {table.num_clients} clients"
        yield ("federation", "clients_per_round"), message, f"at most {table.num_clients}"
    if table.local_tokens is not None and recipe.task.unit != "tokens":
        message = f'the task "{recipe.task.name}" does not count tokens'
        yield ("federation", "local_tokens"), message, "give local_steps"


def _check_fragments(recipe: Recipe) -> Iterator[Finding]:
    """Yield what does not fit clients that keep weights of their own between rounds."""
    table = recipe.federation
    assert table is not None
    if not table.fragments.is_enabled:
        return
    if table.sample_size < table.num_clients or table.dropout:
        message = "all clients must train in each round"
        yield ("federation", "fragments"), message, "leave out clients_per_round and dropout"
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
    owns = table.partition == "sources" or any(client.sources for client in table.client)
    if owns and recipe.task.find_outputs(recipe.loss) is not None:
        message = "outputs on disk are in the order of all sources"
        yield ("federation", "partition"), message, 'partition = "rows" can read them'
    if table.partition == "sources" and table.num_clients > len(labels):
        message = f"{table.num_clients} clients have {len(labels)} sources"
        yield ("federation", "partition"), message, 'give more data.sources, or partition = "rows"'
