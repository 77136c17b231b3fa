"""Decide whether a run may resume from a checkpoint, and whether anything is left to do."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import ProcessGroup

from ... import __version__
from ..checkpoint.find import IntactCheckpoint, find_checkpoint
from ..checkpoint.manifest import Manifest, SaveInfo
from ..checkpoint.store import CheckpointStore
from ..core.errors import Problem, RecipeError
from ..core.run_state import RunState
from ..core.text.display import remove_secrets
from ..core.text.tree import leaves
from ..recipe.changes import compare
from ..recipe.schema import Recipe
from ..recipe.tables import Init
from ..train.parts import Best
from .hub_pins import list_hub_ids
from .metadata import Checkout, name_run

if TYPE_CHECKING:
    from ..assemble.assemble import Assembled


def find_start(
    recipe: Recipe, store: CheckpointStore, warn: Callable[[str], None]
) -> IntactCheckpoint | None:
    """Return the checkpoint to resume from; None: the run starts.

    A run resumes once from the checkpoint that `run.resume` names. When the same recipe starts
    again, such as in a job that was queued again, it resumes from what the run has saved since.

    Args:
        recipe: its `run.resume` says where.
        store: the checkpoints of the run.
        warn: told about each checkpoint that is skipped.

    Raises:
        RecipeError: the run shall not resume, and there are checkpoints.
        CheckpointError: no checkpoint is intact.
    """
    resume = recipe.run.resume
    if resume not in ("auto", "never"):
        found = store.latest(partial(_is_continued, recipe))
        if found is None:
            return find_checkpoint(Path(resume), store.group)
        warn(f"this run resumed from {resume} before, and continues from {found.path.name}")
    else:
        found = store.latest()
    if found is None:
        return None
    if resume == "never":
        message = f"{store.folder} already has checkpoints, the newest of step"
        raise RecipeError(
            [
                Problem(
                    f'{message} {found.manifest.step}, and "never" would mix two runs',
                    key="run.resume",
                    hint="give another run.name, or remove the old run",
                )
            ]
        )
    for reason in found.skipped:
        warn(f"skipped {reason}")
    return found


def _is_continued(recipe: Recipe, manifest: Manifest) -> bool:
    """Return whether a run with this recipe, its `run.resume` included, saved the checkpoint."""
    resumed = dict(leaves(manifest.recipe)).get(("run", "resume"))
    return resumed == recipe.run.resume and not compare(manifest.recipe, recipe.model_dump())


def require_same_data(saved: Manifest, parts: Assembled, allowed: Sequence[str]) -> None:
    """Check that the tokenizer and the tokens are those that the checkpoint was trained on.

    Raises:
        RecipeError: one of them differs, and `allowed` does not name it.
    """
    found = {
        "tokenizer": (saved.tokenizer, parts.tokenizer.fingerprint),
        "data": (saved.data, parts.data.fingerprint),
    }
    if key := parts.recipe.task.frozen_key:
        found[f"task.{key}"] = (saved.frozen, parts.frozen_fingerprint)
    problems = [
        Problem(
            f"the content changed since the checkpoint of step {saved.step}: was {old}, is {new}",
            key=key,
            hint=f"`--allow-changed {key}` resumes anyway",
        )
        for key, (old, new) in found.items()
        if old != new and key not in allowed
    ]
    if problems:
        raise RecipeError(problems)


def identify(
    parts: Assembled,
    found: IntactCheckpoint | None,
    checkouts: Sequence[Checkout] = (),
    recipe: Recipe | None = None,
) -> SaveInfo:
    """Return the description of the run that each checkpoint of this attempt holds.

    Args:
        parts: the parts of the run.
        checkouts: where the code comes from, on the rank that writes manifests.
        found: the checkpoint that the attempt starts from; None at the start of a run.
        recipe: the recipe as it was given; None: that of the parts.
    """
    values = remove_secrets((recipe or parts.recipe).model_dump(mode="json"))
    recipe_hash = xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())
    return SaveInfo(
        step=0,
        world=parts.world.world_size,
        mesh=asdict(parts.degrees),
        recipe=values,
        recipe_hash=recipe_hash,
        tokenizer=parts.tokenizer.fingerprint,
        data=parts.data.fingerprint,
        frozen=parts.frozen_fingerprint,
        versions={
            "trainer": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        run_id=name_run(checkouts, recipe_hash),
        attempt=found.manifest.attempt + 1 if found else 0,
    )


def make_state(parts: Assembled, start_step: int, info: SaveInfo, ranks: int) -> RunState:
    """Return what `trainer status` reads of an attempt.

    Args:
        parts: the parts of the run.
        start_step: the steps that were finished before.
        info: number and id of the attempt.
        ranks: number of processes of the job.
    """
    cuda = parts.device.type == "cuda"
    return RunState(
        total_steps=parts.total_steps,
        start_step=start_step,
        attempt=info.attempt,
        run_id=info.run_id,
        world=ranks,
        device=torch.cuda.get_device_name(parts.device) if cuda else parts.device.type,
    )


def reason_to_end(saved: Manifest, parts: Assembled) -> str:
    """Return why nothing is left to do after a checkpoint; empty while there is more to train."""
    if saved.extra.get("unevaluated"):
        return ""
    best = Best.from_manifest(saved.extra)
    if saved.step >= parts.total_steps:
        return "finished before"
    if best.is_exhausted(parts.evaluate):
        return f"stopped early before, {best.describe()}"
    return ""


def ignored_settings(parts: Assembled) -> list[str]:
    """Return a sentence for each setting that can have no effect in this run."""
    recipe = parts.recipe
    ignored = []
    loss = recipe.kernels.linear_cross_entropy
    if parts.degrees.tensor > 1 and loss not in ("auto", "torch"):
        why = "parallel.tensor splits the vocabulary, which torch's alone knows"
        ignored.append(f'kernels.linear_cross_entropy = "{loss}" has no effect: {why}')
    swiglu = recipe.kernels.swiglu
    if getattr(recipe.model, "has_geglu", False) and swiglu not in ("auto", "torch"):
        why = f'model "{recipe.model.name}" has GeGLU, of which there is torch\'s alone'
        ignored.append(f'kernels.swiglu = "{swiglu}" has no effect: {why}')
    if not recipe.task.fields:
        reads = "the task reads no records"
        given = {"data.on_long": recipe.data.on_long != "error", "data.pad_to": recipe.data.pad_to}
        ignored += [f"{key} has no effect: {reads}" for key in given if given[key]]
    if recipe.run.init != Init() and not recipe.run.init_from:
        ignored.append("run.init has no effect without run.init_from")
    if parts.splits or recipe.evaluate.harness.tasks:
        return ignored
    given = {
        "checkpoint.keep_best": recipe.checkpoint.keep_best,
        "evaluate.patience": recipe.evaluate.patience,
    }
    why = "evaluate.interval is 0" if not recipe.evaluate.is_enabled else "nothing is held out"
    without = f"has no effect without evaluations: {why}"
    return ignored + [f"{key} {without}" for key in given if given[key]]


def describe_model(parts: Assembled) -> str:
    """Return the line that names the model and counts the parameters of all ranks."""
    remote = sum(map(prod, parts.model.remote_parameters.values()))
    parameters = remote + sum(weight.numel() for weight in parts.model.parameters())
    frozen = sum(each.numel() for each in parts.model.parameters() if not each.requires_grad)
    of_them = f", {parameters - frozen:,} of them trained" if frozen else ""
    return f"model: {parts.recipe.model.name}, {parameters:,} parameters{of_them}"


def describe(parts: Assembled) -> list[str]:
    """Return the lines that describe the run, for `--dry-run`."""
    recipe = parts.recipe
    degrees = parts.degrees
    return [
        *parts.notes,
        describe_model(parts),
        f"ranks: {parts.world.world_size} on {parts.device.type}",
        "plan: " + " x ".join(f"{axis} {degree}" for axis, degree in asdict(degrees).items()),
        f"task: {recipe.task.name}, loss {recipe.loss.name}",
        *_describe_steps(parts),
        f"validation: {len(parts.validation)} batches a rank",
        "dry run: nothing was trained or written",
    ]


def _describe_steps(parts: Assembled) -> Iterator[str]:
    """Yield the lines that describe the steps, of each training split if there are splits."""
    yield from [f"steps: {parts.total_steps:,}"] * bool(parts.recipe.data.splits)
    for turn in parts.data.turns:
        size, share = turn.table.global_batch, turn.table.global_batch // parts.degrees.data
        micro = min(turn.table.micro_batch, share)
        is_counted = parts.recipe.task.unit == "tokens"
        tokens = f", {size * turn.table.seq_len:,} tokens" if is_counted else ""
        steps = f"split {turn.name}" if turn.name else f"steps: {parts.total_steps:,}"
        yield f"{steps} of {size:,} samples{tokens}"
        yield f"a rank's step: {-(-share // micro)} x {micro:,} samples"


def require_same_pins(recipe: Recipe, group: ProcessGroup | None) -> None:
    """Refuse ranks that found different commits, because a branch moved between their downloads.

    Raises:
        RecipeError: the commits of each model, of which one can be named in the recipe.
    """
    mine = [f"{table}.{key} = {pinned}" for table, key, pinned in list_hub_ids(recipe)]
    if group is None or not mine:
        return
    found: list[list[str] | None] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    texts = sorted({text for each in found for text in each or ()})
    if len(texts) > len(mine):
        raise RecipeError(
            f"ranks found different commits of one model: {'; '.join(texts)}",
            "name the commit in the recipe",
        )
