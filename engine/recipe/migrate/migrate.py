"""Turn the settings of another trainer into a recipe, and say what could not be carried over.

The keys are those of torchtitan's TOML, and of YAML for Hugging Face's Trainer, TRL and axolotl.
`other_names` says what each is called here; this package changes the values that are written in
another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ...core.errors import Problem, RecipeError
from ...core.text.display import make_printable
from ...core.text.positions import KeyPath
from ...core.text.tree import Origin, Tree, leaves
from ..load import load_tree
from ..other_names import KEYS, find_component, find_key
from ..read import unusable_values
from ..schema import REGISTRIES
from .settings import MOST_SETTINGS
from .values import BASES, NUMBER, SPECIAL, BatchSizes, Migration, put

MOST_REPAIRS = 20
SAME = {
    "model.name": "model.name",
    "model.flavor": "model.flavor",
    "optimizer": "optimizer.name",
    "optimizer.name": "optimizer.name",
    "weight_decay": "optimizer.weight_decay",
    "optimizer.eps": "optimizer.eps",
    "warmup_steps": "schedule.warmup_steps",
    "checkpoint.interval": "checkpoint.interval",
    "last_save_model_only": "checkpoint.last",
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "fsdp_reshard_after_forward": "parallel.fsdp.strategy",
}
"""Settings, some with their table, whose entry in `other_names` is more than a key."""

WORDS: dict[str, dict[Any, Any]] = {
    "memory.recompute": {True: "full", False: "none"},
    "data.packing": {True: "documents", False: "none"},
    "checkpoint.mode": {"disabled": "sync", "async_with_pinned_mem": "async_pinned"},
    "precision.compute": {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"},
    "precision.reduce": {"float32": "fp32", "bfloat16": "bf16"},
    "parallel.fsdp.strategy": {"always": "full_shard", "never": "shard_grad_op"},
    "model.flavor": {"debugmodel": "debug"},
    "checkpoint.last": {True: "weights", False: "full"},
}
"""key -> the other trainer's value -> the recipe's value"""

SWITCHES = {
    ("checkpoint", "enable"): "checkpoint.interval",
    ("validation", "enable"): "evaluate.interval",
}
"""Switches, and the key of a recipe that is 0 where they are off."""

KINDS = {"model.name": "model", "optimizer.name": "optimizer", "schedule.name": "schedule"}


def migrate(
    settings: Mapping[str, Any],
    path: Path,
    ranks: int = 1,
    started: Mapping[str, Mapping[str, Any]] | None = None,
) -> Migration:
    """Return a valid recipe of another trainer's settings.

    Args:
        settings: the settings, as `read_settings` returns them.
        path: the file that they were read from, where relative paths start.
        ranks: the number of data-parallel ranks, by which a batch is multiplied.
        started: tables of a recipe that starts from a model's folder; they override the settings.

    Raises:
        RecipeError: there are too many settings, or no recipe can be made of them.
    """
    found = Migration()
    # A bound, because aliases of YAML make few bytes large: nothing else walks the whole tree.
    given = list(islice(_settings(settings), MOST_SETTINGS + 1))
    if len(given) > MOST_SETTINGS:
        message = f"has more than {MOST_SETTINGS:,} settings"
        raise RecipeError([Problem(message, "", make_printable(str(path)))])
    flat = dict(given)
    batch = BatchSizes(ranks)
    for keys, value in given:
        _carry(keys, value, flat, found, batch)
    batch.set_sizes(found.values)
    for switch, key in SWITCHES.items():
        if flat.get(switch) is False:
            put(found.values, key, 0)
    if "path" in (tokenizer := found.values.get("tokenizer", {})):
        tokenizer.setdefault("name", "hf")
    if started:
        found.left = [(name, why) for name, why in found.left if name not in BASES]
    for table, inner in (started or {}).items():
        kept = {} if table in ("model", "tokenizer") else found.values.get(table, {})
        found.values[table] = {**kept, **inner}
    run = found.values.setdefault("run", {})
    if not {"steps", "epochs"} & {*run}:
        run["steps"] = 100
        found.left.append(("run.steps", "the file does not say how long to train: 100 is a guess"))
    _repair(found, path)
    return found


def _settings(
    value: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield key path and value of each setting; a list is one value."""
    for key, inner in value.items():
        here = (*above, str(key))
        if isinstance(inner, dict) and inner and len(here) < 8:
            yield from _settings(inner, here)
        else:
            yield here, inner


def _carry(
    keys: tuple[str, ...],
    value: Any,
    flat: Mapping[tuple[str, ...], Any],
    found: Migration,
    batch: BatchSizes,
) -> None:
    """Put one setting into the recipe, or among what is left."""
    name = ".".join(keys)
    if value is None or value in ("", "default") or keys in SWITCHES:
        return  # not set: the default applies
    around = ".".join(keys[-2:])
    is_special = keys[-1] in SPECIAL and (len(keys) == 1 or around not in KEYS)
    try:
        _require_small(value)
        if around not in KEYS and keys[0] == "validation":
            raise ValueError('write it in [[data.sources]], with split = "validation"')
        if is_special:
            SPECIAL[keys[-1]](value, flat, found, batch)
        else:
            target = SAME.get(around) or SAME.get(keys[-1]) or find_key(*keys)
            if not re.fullmatch(r"[a-z]\w*(\.\w+)+", target):
                if value is False:
                    return  # a feature that is switched off, and that a recipe does not have
                raise ValueError(f"here it is {target}" if target else "no equivalent in a recipe")
            put(found.values, target, _convert(target, value))
        found.carried += 1
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        found.left.append((name, str(error)))


def _require_small(value: Any) -> None:
    """Refuse a list without end or nearly so, which aliases of YAML can make.

    Raises:
        ValueError: it has more than `MOST_SETTINGS` parts.
    """
    stack, count = [value], 0
    while stack:
        inner = stack.pop()
        count += 1
        if count > MOST_SETTINGS:
            raise ValueError("is too large")
        if isinstance(inner, dict | list):
            stack += [*inner.values()] if isinstance(inner, dict) else inner


def _convert(target: str, value: Any) -> Any:
    """Return a value as it is written here.

    Raises:
        ValueError: a recipe has no equivalent.
    """
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value) if re.search("[.eE]", value) else int(value)  # YAML reads 2e-5 as text
    if target in KINDS:
        kind, word = KINDS[target], str(value)
        known = REGISTRIES[kind]
        ours = word.lower() if word.lower() in known else find_component(kind, word)
        if ours not in known:
            raise ValueError(f"no {kind} is equivalent to {make_printable(word)}")
        return ours
    words = WORDS.get(target, {})
    value = words.get(value, value) if isinstance(value, str | bool) else value
    return str(value).lower() if target == "model.flavor" else value


def _repair(found: Migration, path: Path) -> None:
    """Leave out what the recipe refuses, until it is valid."""
    for key, message in list(unusable_values(found.values)):
        _drop(found, key, message)
    for _ in range(MOST_REPAIRS):
        origins: dict[KeyPath, Origin] = {(): Origin(str(path), folder=path.parent.absolute())}
        try:
            load_tree(Tree(_copy(found.values), origins), path, (), None)
            found.values = _without_empty(found.values)
            return
        except RecipeError as error:
            before = len(found.left)
            # Entries of lists from the last on: the numbers of those before stay what they are.
            for problem in reversed(error.problems):
                parts = re.split(r"[.\[\]]+", problem.key.strip("]"))
                key = tuple(int(part) if part.isdigit() else part for part in parts)
                _drop(found, key, problem.message)
            if len(found.left) == before:
                raise
    raise RecipeError("no valid recipe can be made of these settings")


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables without those that say nothing."""
    inner = {
        key: _without_empty(each) if isinstance(each, dict) else each
        for key, each in values.items()
    }
    return {key: each for key, each in inner.items() if each != {}}


def _drop(found: Migration, key: KeyPath, message: str) -> None:
    """Take a key out of the recipe, or the table or entry that it is missing from."""
    known = {path for path, _ in leaves(found.values)}
    while key and not any(path[: len(key)] == key for path in known):
        key = key[:-1]
    if not key or key == ("run",):
        return
    container: Any = found.values
    for part in key[:-1]:
        container = container[part]
    del container[key[-1]]
    found.carried = max(0, found.carried - 1)
    found.left.append((".".join(map(str, key)), message))
