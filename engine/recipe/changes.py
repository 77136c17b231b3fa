"""The recipe in a checkpoint, and which keys may change when a run resumes from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..checkpoint.manifest import Manifest
from ..core.errors import CheckpointError, Problem, RecipeError, nearest
from ..core.text.display import format_value, join_key, remove_secrets
from ..core.text.tree import leaves
from ..optim.tables import schedules
from .schema import Recipe

Change = tuple[str, Any, Any]
"""key, value in the checkpoint, value in the recipe given"""

FREE = (
    "run.name",
    "run.dir",
    "run.experiment",
    "run.lineage",
    "run.resume",
    "run.init_from",
    "run.init",
    "run.gc_interval",
    "lora.init_from",
    "run.deterministic",
    "data.micro_batch",
    "data.workers",
    "data.worker_timeout_seconds",
    "data.cache_dir",
    "parallel",
    "memory",
    "compile",
    "task.max_answer_tokens",
    "kernels",
    "checkpoint",
    "evaluate",
    "federation.carrier",
    "federation.processes",
    "federation.elastic",
    "metrics",
    "profile",
    "resilience",
    "plugins.modules",
)
"""Keys, with all below them, that cannot change what is trained."""

MEASURING = ("evaluate", "task.max_answer_tokens")
"""Keys on which the score depends, which some schedules follow."""

WITHOUT_SCORE = ("evaluate.patience", "evaluate.min_delta")
"""Keys of `[evaluate]` that change neither the score nor when it is measured."""

FREE_IN_LISTS = re.compile(
    r"data\.(splits\.\d+\.)?sources\.\d+\.label|data\.splits\.\d+\.micro_batch"
)
"""What metrics call a source is free as well, and the micro batch of a training split."""

RESHAPING = ("lora.rank", "lora.targets", "lora.dora", "optimizer.name")
"""Keys beside the model's sizes after whose change a checkpoint cannot be loaded."""

CHECKED_BY_CONTENT = re.compile(
    r"(tokenizer|data\.(splits\.\d+\.)?sources\.\d+)\.path"
    r"|task\.(teacher|reference|precomputed)"
)
"""Where files are may change; that they hold the same is checked when they are opened."""


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], allowed: Collection[str] = ()
) -> list[Change]:
    """Return what differs between two recipes and neither is free to change nor allowed.

    Args:
        old: the checkpoint's recipe, as `model_dump` gives it; keys that it lacks have defaults.
        new: the recipe given.
        allowed: keys of `--allow-changed`, each with all below it.

    Raises:
        RecipeError: an allowed key that no recipe has.
    """
    # What was kept has no passwords: without them, both are the same again.
    before, after = _leaves(remove_secrets(old)), _leaves(remove_secrets(new))
    _check_known(allowed, {*before, *after, "run.steps", "run.epochs"})
    free = {*FREE}
    schedule = schedules[new["schedule"]["name"]].model_validate(new["schedule"])
    # More steps then change none of those that are done.
    ema = new["ema"]
    at_end = schedule.momentum_cooldown_steps or ema["last_steps"] or ema["nesterov"]["scale"]
    if not schedule.depends_on_total and not at_end:
        free |= {"run.steps", "run.epochs", "federation.rounds"}
    if schedule.follows_score:
        free = free - {*MEASURING} | {*WITHOUT_SCORE}
    free |= {*allowed}
    return [
        (key, before.get(key), after.get(key))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
        and not _covered(key, free)
        and not CHECKED_BY_CONTENT.fullmatch(key)
        and not FREE_IN_LISTS.fullmatch(key)
    ]


def digest_keys(recipe: Recipe) -> dict[str, str]:
    """Return a short digest of each key that replica groups of one run must have alike.

    Plan, precision, kernels and paths are each group's own.
    """
    own = {*FREE, "precision"} - {"federation.elastic"}
    return {
        key: sha256(repr(value).encode()).hexdigest()[:8]
        for key, value in _leaves(remove_secrets(recipe.model_dump())).items()
        if not _covered(key, own)
        and not CHECKED_BY_CONTENT.fullmatch(key)
        and not FREE_IN_LISTS.fullmatch(key)
    }


def resume_policy(key: str) -> str:
    """Return in words whether a resumed run may change a key, such as `data.sources.0.weight`."""
    if _covered(key, MEASURING) and not _covered(key, WITHOUT_SCORE):
        return "may change, except under a schedule that follows the score, such as plateau"
    if _covered(key, FREE) or FREE_IN_LISTS.fullmatch(key):
        return "may change"
    if key in ("run.steps", "run.epochs", "federation.rounds"):
        return "may change under a schedule that does not depend on it, such as constant"
    if CHECKED_BY_CONTENT.fullmatch(key):
        return "may change; what is there must be the same"
    return f"only with --allow-changed {key}"


def require_unchanged(
    old: Mapping[str, Any], new: Mapping[str, Any], allowed: Collection[str] = ()
) -> None:
    """Refuse a recipe that differs from its checkpoint's in keys that change training.

    Raises:
        RecipeError: every such key with its old and new value.
    """
    changes = compare(old, new, allowed)
    problems = [
        Problem(f"is {format_value(after)}, and {format_value(before)} in the checkpoint", key)
        for key, before, after in changes
    ]
    if problems:
        keys = [key for key, _, _ in changes]
        resume = f"to resume anyway, add --allow-changed {','.join([*allowed, *keys])}"
        if not _fits(old, new, keys):
            resume = "the checkpoint's weights and optimizer state do not fit this recipe"
        rename = f"to train it as a new run, add {_rename(Recipe.model_validate(new))}"
        problems.append(
            Problem(
                "this recipe differs from the checkpoint's in keys that change training",
                hint=f"{rename}; {resume}",
            )
        )
        raise RecipeError(problems)


def _fits(old: Mapping[str, Any], new: Mapping[str, Any], changed: Collection[str]) -> bool:
    """Return whether a checkpoint may be loaded into another recipe's model and optimizer."""
    if any(_covered(key, RESHAPING) for key in changed):
        return False
    try:
        models = [Recipe.model_validate(each).model for each in (old, new)]
    except ValidationError:
        return True  # a recipe of another version: what does not fit is found when it is loaded
    # An open vocabulary comes from the tokenizer, whose content is checked when it is opened.
    before, after = (model.with_vocab(1).parameter_shapes() for model in models)
    return before == after


def _rename(recipe: Recipe) -> str:
    """Return the options that give the run a name for which there is no folder."""
    folder = recipe.run.folder
    names = (f"{folder.name}-{number}" for number in count(2))
    name = next(name for name in names if not folder.with_name(name).exists())
    # A checkpoint that the recipe names would be resumed under any name.
    resume = " --set run.resume=auto" * (recipe.run.resume not in ("auto", "never"))
    return f"--set run.name={name}{resume}"


def _leaves(recipe: Mapping[str, Any]) -> dict[str, Any]:
    try:
        # Validated, so that keys which an older recipe lacks have their defaults.
        recipe = Recipe.model_validate(recipe).model_dump()
    except ValidationError:
        # Written by another version, some of whose keys are no more: compared as they are.
        recipe = dict(recipe)
    return {join_key(path): _plain(value) for path, value in leaves(recipe)}


def _plain(value: Any) -> Any:
    """Return a tuple as a list, which it becomes in the manifest's JSON; other values as given."""
    return list(value) if isinstance(value, tuple) else value


def _covered(key: str, prefixes: Collection[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:count]) in prefixes for count in range(1, len(parts) + 1))


def _check_known(allowed: Collection[str], keys: Collection[str]) -> None:
    prefixes = {
        ".".join(key.split(".")[:count])
        for key in keys
        for count in range(1, len(key.split(".")) + 1)
    }
    problems = [
        Problem(f"no recipe has the key {format_value(word)}", "--allow-changed", hint=hint)
        for word in allowed
        if word not in prefixes
        for hint in [nearest(word, prefixes)]
    ]
    if problems:
        raise RecipeError(problems)


def load_saved_recipe(folder: Path, manifest: Manifest) -> Recipe:
    """Return a checkpoint's recipe; a tokenizer that lies in the checkpoint is found where it is.

    Args:
        folder: of the checkpoint, which may have been moved.

    Raises:
        CheckpointError: it does not fit this version, or needs plugins that are not imported.
    """
    content, table = manifest.recipe, manifest.recipe.get("tokenizer")
    if "tokenizer.json" in manifest.files and isinstance(table, dict):
        # The path in the recipe may be gone, or hold another tokenizer by now.
        content = {**content, "tokenizer": {**table, "path": str(folder)}}
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        first, plugins = error.errors()[0], content.get("plugins")
        modules = plugins.get("modules") if isinstance(plugins, dict) else None
        words = " ".join(f"--plugin {each}" for each in modules or [])
        raise CheckpointError(
            f"the recipe in {folder} does not fit this version: "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            f"it was trained with plugins: add {words}" if words else "",
        ) from error
