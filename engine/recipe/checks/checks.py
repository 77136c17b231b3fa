"""What no table of a recipe can see alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from math import prod

from ...core.text.display import format_value, make_printable
from ...core.text.expressions import ExpressionError, compile_expression
from ...core.text.positions import KeyPath
from ...core.text.selection import Renaming, rename_function
from ...core.text.tree import Finding
from ...observe.tables import Histograms
from ...parallel.mesh import AXES, DATA_AXES, Degrees
from ..schema import Recipe
from .adapter_checks import check_adapters
from .compute_checks import check_memory, check_precision
from .expert_checks import check_experts
from .federation_checks import check_federation, count_job_ranks
from .metric_checks import check_metrics
from .plan_checks import check_plan
from .ragged_checks import check_ragged
from .split_checks import check_splits, relocate
from .task_checks import check_task
from .update_checks import check_update


def check(recipe: Recipe, world: int | None = None) -> list[Finding]:
    """Return everything that does not fit together.

    Args:
        recipe: tables that are each valid alone.
        world: number of ranks; without it, what depends on it is not checked.
    """
    found, world = [*check_federation(recipe)], count_job_ranks(recipe, world)
    if not recipe.data.splits:
        return found + _check_table(recipe, world)
    found += check_splits(recipe)
    for number, (split, table) in enumerate(
        zip(recipe.data.splits, recipe.data.tables, strict=True)
    ):
        alone = recipe.model_copy(update={"data": table})
        for path, message, hint in _check_table(alone, world, is_split=True):
            found.append((relocate(path, number, split), message, hint))
    return list(dict.fromkeys(found))  # what is wrong with all splits is said once


def _check_table(recipe: Recipe, world: int | None, *, is_split: bool = False) -> list[Finding]:
    """Return what does not fit a recipe without splits, or with one split alone."""
    parts = (
        _run,
        _init,
        check_task,
        _lengths,
        _data,
        partial(_streams, has_epochs=is_split),
        _groups,
        check_update,
        _targets,
        _degrees,
        _timeouts,
        check_metrics,
        check_ragged,
    )
    findings = [finding for part in parts for finding in part(recipe)]
    if not any(path[:1] == ("precision",) for path, _, _ in findings):  # patterns are usable
        findings += check_precision(recipe, known_degrees(recipe, world))
        findings += [*check_experts(recipe), *check_adapters(recipe)]
    return findings + list(_ranks(recipe, world))


def known_degrees(recipe: Recipe, world: int | None) -> Degrees:
    """Return the degree of each axis; -1 for one that takes what is left of an unknown number."""
    degrees = recipe.parallel.degrees
    is_settled = world is not None and list(degrees.by_axis.values()).count(-1) == 1
    return degrees.fill(world) if is_settled and world is not None else degrees


def data_ranks(recipe: Recipe, world: int | None) -> int | None:
    """Return over how many ranks the batch is split, or None while that is open."""
    degrees = known_degrees(recipe, world)
    return degrees.data if degrees.is_known(*DATA_AXES) else None


def _run(recipe: Recipe) -> Iterator[Finding]:
    run = recipe.run
    has_rounds = recipe.federation and not recipe.federation.is_job
    if run.steps is None and run.epochs is None and not has_rounds:
        yield ("run", "steps"), "is missing: how long to train", "give steps or epochs"
    if run.steps is not None and run.epochs is not None:
        yield (
            ("run", "epochs"),
            f"steps ({run.steps}) and epochs ({run.epochs:g}) are both given",
            "keep one of them",
        )
    for key in ("name", "experiment", "lineage"):
        name = getattr(run, key)
        if not re.fullmatch(r"\w[\w.-]{0,99}", name) and (name or key == "name"):
            yield (
                ("run", key),
                f"{format_value(name)} cannot name the {'run' if key == 'name' else key}'s folder",
                "use up to 100 letters, digits, `.`, `_` and `-`, the first a letter or digit",
            )
    if re.fullmatch(r"\w*", run.resume) and run.resume not in ("auto", "never"):
        given = format_value(run.resume)
        message = f'expected "auto", "never" or a checkpoint\'s path, got {given}'
        yield ("run", "resume"), message, ""


def _timeouts(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.resilience
    if table.hang_seconds >= table.collective_timeout_seconds:
        yield (
            ("resilience", "hang_timeout_seconds"),
            (
                f"{table.hang_seconds:g} s is not less than resilience.collective_timeout_seconds "
                f"({table.collective_timeout_seconds:g})"
            ),
            "a hang must be noticed before the other ranks give up; leave it out for the half",
        )


def _lengths(recipe: Recipe) -> Iterator[Finding]:
    # A plugin's model need not limit its sequences.
    longest = getattr(recipe.model, "max_seq_len", None)
    if longest is not None and recipe.data.seq_len > longest:
        yield (
            ("data", "seq_len"),
            f"seq_len ({recipe.data.seq_len}) is over model.max_seq_len ({longest})",
            "",
        )
    if why := recipe.model.unsupported_length(recipe.data.seq_len):
        yield ("data", "seq_len"), why, "set model.rope_scaling.use_long = true for longer rows"
    warmup, steps = recipe.schedule.warmup_steps, recipe.run.steps
    if steps is not None and warmup > steps:
        yield (
            ("schedule", "warmup_steps"),
            f"warmup_steps ({warmup}) is more than run.steps ({steps})",
            f"set schedule.warmup_steps to at most {steps}, or more run.steps",
        )


def _data(recipe: Recipe) -> Iterator[Finding]:
    if all(source.split == "validation" for source in recipe.data.sources):
        yield ("data", "sources"), 'no source has split = "train"', ""
    first: dict[tuple[str, str], int] = {}
    for index, (source, label) in enumerate(
        zip(recipe.data.sources, recipe.data.labels, strict=True)
    ):
        before = first.setdefault((source.split, label), index)
        if before != index:
            yield (
                ("data", "sources", index, "label"),
                f'source {before} of the "{source.split}" split has the label "{label}" too',
                "give each a label of its own",
            )


def _streams(recipe: Recipe, *, has_epochs: bool) -> Iterator[Finding]:
    """Yield what streams cannot do.

    Args:
        recipe: the recipe.
        has_epochs: whether an epoch is a number of steps: a round over splits.
    """
    for index, source in enumerate(recipe.data.sources):
        if not getattr(source, "streaming", False):
            continue
        path = ("data", "sources", index, "streaming")
        if source.split == "validation":
            yield path, "a validation source is read whole", "leave streaming out"
        if recipe.run.epochs is not None and not has_epochs:
            yield (
                path,
                "the number of rows in an epoch of a stream is unknown",
                "give run.steps instead of run.epochs",
            )
        for table in ("evaluate", "checkpoint", "schedule"):
            key = "warmup_epochs" if table == "schedule" else "interval_epochs"
            if getattr(getattr(recipe, table), key) is not None and not has_epochs:
                words = "the number of rows in an epoch of a stream is unknown"
                yield (table, key), words, "give steps instead of epochs"
        if recipe.data.workers:
            yield (
                path,
                f"data.workers ({recipe.data.workers}) do not read streams",
                "a process of its own tokenises each stream: set data.workers = 0",
            )


def _groups(recipe: Recipe) -> Iterator[Finding]:
    optimizer = recipe.optimizer
    rates = optimizer.rates_of(is_matrix=True)
    for index, group in enumerate(optimizer.groups):
        path = ("optimizer", "groups", index)
        for key in sorted(set(group.overrides(rates)) - optimizer.group_keys):
            known = ", ".join(sorted(optimizer.group_keys))
            yield (
                (*path, key),
                f'"{optimizer.name}" has no {key} for a group of parameters',
                f"known: {known}",
            )
        yield from _pattern((*path, "match"), group.match)


def _init(recipe: Recipe) -> Iterator[Finding]:
    for index, pattern in enumerate(recipe.run.init.exclude):
        yield from _pattern(("run", "init", "exclude", index), pattern)
    for index, entry in enumerate(recipe.run.init.rename):
        try:
            rename_function(Renaming(entry.match, entry.to))
        except ExpressionError as error:
            yield ("run", "init", "rename", index), make_printable(str(error)), ""


def _targets(recipe: Recipe) -> Iterator[Finding]:
    if recipe.lora.rank and not recipe.model.layout.blocks:
        message = f'the model "{recipe.model.name}" has no blocks, whose projections LoRA adapts'
        yield ("lora", "rank"), message, "leave it out"
    lists: dict[KeyPath, list[str]] = {("lora", "targets"): recipe.lora.targets}
    for word, table in (("float8", recipe.precision.float8), ("mx", recipe.precision.mx)):
        lists["precision", word, "targets"] = table.targets
        lists["precision", word, "exclude"] = table.exclude
    for index, monitor in enumerate(recipe.metrics.monitors):
        if isinstance(monitor, Histograms):
            yield from _pattern(("metrics", "monitors", index, "match"), monitor.match)
    for path, patterns in lists.items():
        for index, pattern in enumerate(patterns):
            yield from _pattern((*path, index), pattern)


def _pattern(path: KeyPath, pattern: str) -> Iterator[Finding]:
    # Every glob is valid.
    if not pattern.startswith("re:"):
        return
    try:
        compile_expression(pattern.removeprefix("re:"))
    except ExpressionError as error:
        yield path, make_printable(f"{format_value(pattern)} is no regular expression: {error}"), ""


def _degrees(recipe: Recipe) -> Iterator[Finding]:
    parallel = recipe.parallel
    for axis in AXES:
        if getattr(parallel, axis) == 0:
            yield ("parallel", axis), "expected at least 1, or -1 for what is left over, got 0", ""
    open_axes = [axis for axis in AXES if getattr(parallel, axis) == -1]
    for axis in open_axes[1:]:
        yield (
            ("parallel", axis),
            f"{axis} and {open_axes[0]} are both -1",
            "give all degrees but one",
        )
    if parallel.fsdp.sharding.needs_replicas and parallel.replicate == 1:
        yield (
            ("parallel", "fsdp", "strategy"),
            f'"{parallel.fsdp.strategy}" replicates over parallel.replicate, which is 1',
            "set parallel.replicate",
        )


def _ranks(recipe: Recipe, world: int | None) -> Iterator[Finding]:
    """Yield what does not fit the number of ranks."""
    degrees = recipe.parallel.degrees
    fixed = prod(degree for degree in degrees.by_axis.values() if degree > 0)
    if world is not None:
        is_open = not degrees.is_known(*AXES)
        if world % fixed if is_open else world != fixed:
            relation = "does not divide" if is_open else "is not"
            yield (
                ("parallel",),
                f"the product of the degrees ({fixed}) {relation} the world size ({world})",
                "one degree may be -1: what is left over",
            )
            # With degrees that do not fit, whatever follows from them would be wrong as well.
            return
    yield from check_plan(recipe, known_degrees(recipe, world))
    yield from check_memory(recipe, known_degrees(recipe, world))
    ranks = data_ranks(recipe, world)
    data = recipe.data
    if ranks is None or ranks < 1:
        return
    if data.global_batch % ranks:
        yield (
            ("data", "global_batch"),
            f"global_batch ({data.global_batch}) does not divide over {ranks} data ranks",
            f"give a multiple of {ranks}",
        )
    # A micro batch may be larger than a rank's share, and is then the whole share.
    elif data.global_batch // ranks % min(data.micro_batch, data.global_batch // ranks):
        yield (
            ("data", "micro_batch"),
            (
                f"{data.global_batch // ranks} sequences a rank (global_batch {data.global_batch} "
                f"over {ranks}) are no multiple of micro_batch ({data.micro_batch})"
            ),
            "",
        )
