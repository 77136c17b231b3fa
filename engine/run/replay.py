"""Compute one step of a run again and measure each layer: `trainer run --replay`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from ..assemble.assemble import Assembled, assemble
from ..checkpoint.find import IntactCheckpoint, find_checkpoint, newest_intact
from ..checkpoint.manifest import SaveInfo
from ..checkpoint.ranks import Ranks
from ..checkpoint.state import seed_everything
from ..checkpoint.store import CheckpointStore
from ..core.errors import CheckpointError, RecipeError, nearest
from ..core.text.display import make_printable
from ..launch.environment import World
from ..launch.group import create_checkpoint_group, pick_device, process_group
from ..observe.metrics import read_evaluations, read_events
from ..recipe.changes import require_unchanged
from ..recipe.schema import Recipe
from ..report.status import newest_rows, number
from ..train.health import Health
from ..train.parts import Position
from ..train.probe import LayerSums, Probe, merge
from ..train.saving import Saver
from ..train.update import UpdateAfterBackward
from .hub_pins import pin_hub_ids
from .resume import require_same_data


@dataclass(frozen=True)
class ReplayTarget:
    """The step to compute again.

    Attributes:
        name: the event's id, or `step:N`.
        step: counted from 1.
        batch: number of the global batch, counted from 1; None: as without rollbacks.
        recorded: `loss` and `grad_norm` of the step, where the run wrote them.
    """

    name: str
    step: int
    batch: int | None
    recorded: Mapping[str, float | None]


@dataclass(frozen=True)
class Replay:
    """The measurements of a step that was computed again.

    Attributes:
        start: the checkpoint that was loaded; empty for the start of the run.
        start_step: the step of that checkpoint.
        loss: the loss of the step.
        grad_norm: the gradient norm of the step, before clipping.
        layers: the sums of each layer by its name, in the order of the model.
    """

    target: ReplayTarget
    start: str
    start_step: int
    loss: float
    grad_norm: float
    layers: dict[str, LayerSums]


def replay(recipe: Recipe, world: World, word: str, allow_changed: Sequence[str] = ()) -> Replay:
    """Compute a step of the run again, exactly; nothing in the run directory changes.

    The newest checkpoint before the step is loaded, and the steps between are trained again;
    without a checkpoint the run starts from its first step. All ranks call it.

    Args:
        recipe: the recipe of the run.
        world: this process's place among the ranks.
        word: an event's id, or `step:N`.
        allow_changed: keys that may differ from those in the checkpoint.

    Raises:
        RecipeError: there is no such event, or the recipe is not that of the run.
        CheckpointError: the step cannot be reached from what is there.
    """
    folder = recipe.run.folder
    target = find_target(folder, word)
    recipe = pin_hub_ids(recipe)  # the commits of the run, also if a branch has moved since
    device = pick_device(world)
    timeout_seconds = recipe.resilience.collective_timeout_seconds
    with process_group(world, device, timeout_seconds):
        group = create_checkpoint_group(world, timeout_seconds)
        ranks = Ranks(group)
        found = newest_intact(folder, ranks, before=target.step)
        if found is None and recipe.run.resume not in ("auto", "never"):
            found = find_checkpoint(Path(recipe.run.resume), group)
        if found:
            require_unchanged(found.manifest.recipe, recipe.model_dump(), allow_changed)
        seed_everything(recipe.run.seed, world.rank)
        parts = assemble(_for_replay(recipe), world, device, fresh=found is None)
        loss, norm, mine = _compute(parts, folder, found, target, group, allow_changed)
        layers = ranks.reduce(lambda: mine, merge)
    start = str(found.path) if found else ""
    return Replay(target, start, found.manifest.step if found else 0, loss, norm, layers)


def find_target(folder: Path, word: str) -> ReplayTarget:
    """Return the step that a word names.

    Raises:
        RecipeError: none; names those that there are.
    """
    events = {event["id"]: event for event in read_events(folder)}
    if given := re.fullmatch(r"step:(\d{1,15})", word):
        step = max(1, int(given[1]))
        rows = [row for row in newest_rows(folder) if row.get("kind") == "train"]
        row = next((row for row in rows if row["step"] == step), {})
        at_step = [event for event in events.values() if event["step"] == step]
        batch = at_step[-1].get("batch") if at_step else None
    elif event := events.get(word):
        row, step, batch = event, event["step"], event.get("batch")
    else:
        hint = nearest(word, events)
        if not hint:
            known = ", ".join(list(events)[-5:]) or "none"
            hint = f"events of this run: {make_printable(known)}; or step:N"
        raise RecipeError(f"{folder} has no event {make_printable(word)!r}", hint)
    recorded = {key: number(row.get(key)) for key in ("loss", "grad_norm")}
    return ReplayTarget(word, step, batch if isinstance(batch, int) else None, recorded)


def _for_replay(recipe: Recipe) -> Recipe:
    """Return the recipe with what computes the same numbers, and layers that can be watched."""
    changes: dict[str, dict[str, Any]] = {
        # The name is that of the folder in which streams are tokenised: not the run's own.
        "run": {"name": f"{recipe.run.name}.replay"},
        "compile": {"enabled": False},
        "memory": {"optimizer_in_backward": False},
        "checkpoint": {"keep_best": False},
        "evaluate": {"interval": 0},
        "ema": {"decay": 0.0},
        "data": {"workers": 0},
    }
    if recipe.memory.recompute == "budget":  # of torch.compile
        changes["memory"]["recompute"] = "full"
    tables = {
        name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()
    }
    return recipe.model_copy(update=tables)


def _compute(
    parts: Assembled,
    folder: Path,
    found: IntactCheckpoint | None,
    target: ReplayTarget,
    group: ProcessGroup | None,
    allow_changed: Sequence[str],
) -> tuple[float, float, dict[str, LayerSums]]:
    """Return loss and gradient norm of the step, and this rank's part of the layers."""
    recipe, step, position = parts.recipe, parts.step, Position()
    if target.step > parts.total_steps:
        raise RecipeError(f"step {target.step:,} is beyond the run's {parts.total_steps:,} steps")
    health = Health(recipe.resilience, parts.device, step.scale, lambda text: None)
    if found:
        require_same_data(found.manifest, parts, allow_changed)
        store = CheckpointStore(found.path.parent, mode="sync", keep=1, group=group)
        saver = Saver(store, parts, health, SaveInfo(step=0), lambda text: None)
        saver.restore(found.path, found.manifest, position)
    _skip_what_was_rolled_back(position, target)
    # A schedule that follows the score may have lowered the rate since the checkpoint.
    evaluations = read_evaluations(folder) if parts.schedule.follows_score else {}
    batches = parts.loader.steps(position.batch)
    while position.step < target.step - 1:
        lr_factor = parts.start_step(position)
        gradients = step.accumulate(next(batches))
        position.step, position.batch = position.step + 1, position.batch + 1
        is_updated = health.should_step(
            gradients, position.step, position.batch, recipe.optimizer.lr * lr_factor
        )
        if is_updated:
            step.update(lr_factor)
        parts.finish_step(position.step, is_updated=is_updated)
        step.clear()
        values = evaluations.get(position.step, {})
        if parts.evaluate.score_key in values:
            position.record_score(parts, values)
    # Without clipping the norm is the same, and the layers' gradients stay as they are.
    unclipped = UpdateAfterBackward(
        step.optimizer,
        step.weight_update.run_step,
        0.0,
        0.0,
        step.scale,
        step.parallel_model,
        step.degrees,
        step.device,
    )
    step = replace(step, weight_update=unclipped)
    probe = Probe(step, parts.model_config.layout)
    parts.start_step(position)
    with probe.watch():
        gradients = step.accumulate(next(batches))
    return gradients.loss.item(), gradients.norm.item(), probe.layers


def _skip_what_was_rolled_back(position: Position, target: ReplayTarget) -> None:
    """Set the global batch from which `target` is reached without a rollback.

    Raises:
        CheckpointError: the run came to the step from another checkpoint.
    """
    if target.batch is None:
        return
    batch = target.batch - (target.step - position.step)
    if batch < position.batch or (position.step == 0 and batch > 0):
        raise CheckpointError(
            f"{target.name} cannot be computed: the run came to it from a checkpoint that is gone",
            "raise checkpoint.keep in runs whose steps you want to look at",
        )
    position.batch = batch
