"""The length of a run where layers of a recipe disagree about it."""

from __future__ import annotations

from ..core.text.positions import KeyPath
from ..core.text.tree import Origin, Tree, key_paths
from .layers import SET

COUNTS_STEPS = ("job", "elastic")
"""the carriers under which `run.steps` says how long to train"""


def leave_steps_behind(tree: Tree) -> None:
    """Drop the length of an ordinary run from a layer below `[federation]`, which has its own."""
    federation, run = tree.values.get("federation"), tree.values.get("run")
    if not isinstance(federation, dict) or federation.get("carrier") in COUNTS_STEPS:
        return
    if federation and isinstance(run, dict):
        layers = [tree.origin(path).layer for path in key_paths(federation, ("federation",))]
        for key in ("steps", "epochs"):
            if key in run and tree.origin(("run", key)).layer < max(layers):
                tree.remove(("run", key))


def find_integer(tree: Tree, table: str, key: str) -> int | None:
    """Return the value of a key where it is an integer, which a recipe need not have validated."""
    values = tree.values.get(table)
    value = values.get(key) if isinstance(values, dict) else None
    return value if type(value) is int else None


def shorten_warmup(tree: Tree, written_steps: int | None) -> list[str]:
    """Shrink the warmup of a file where `--set run.steps` makes the run shorter than the warmup.

    Args:
        tree: the recipe, after all overrides.
        written_steps: `run.steps` before them. The warmup keeps its share of the steps.

    Returns:
        a sentence that says so, if it was done.
    """
    path: KeyPath = ("schedule", "warmup_steps")
    warmup = find_integer(tree, "schedule", "warmup_steps")
    steps = find_integer(tree, "run", "steps")
    is_set = [tree.origin(key).file == SET for key in (path, ("run", "steps"))]
    if warmup is None or steps is None or not 0 < steps < warmup or is_set != [False, True]:
        return []
    shorter = warmup * steps // max(written_steps or 10 * warmup, warmup)
    place = tree.origin(path)
    origin = Origin(f"shrunk to --set run.steps={steps}", layer=place.layer)
    tree.replace(path, shorter, {path: origin})
    change = f"schedule.warmup_steps is {shorter} instead of {warmup} ({place})"
    return [f"{change}, because --set run.steps={steps} shortens the run"]
