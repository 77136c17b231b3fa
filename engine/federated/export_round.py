"""Turns a round into an ordinary checkpoint of its weights."""

from __future__ import annotations

import shutil
from dataclasses import fields, replace
from pathlib import Path

from ..checkpoint.find import find_checkpoint
from ..checkpoint.manifest import DATA_SUFFIXES, SaveInfo
from ..conversion.native import read_section, write_native
from ..core.unfinished import Unfinished


def export_round(round_folder: Path, target: Path) -> None:
    """Write the global weights of a round as a checkpoint that knows of no federation.

    The averaged weights of `[ema]` come along. No rank's memory is needed: tensors are copied piece
    by piece.

    Args:
        round_folder: the checkpoint of the round.
        target: the folder of the checkpoint to write, which must not exist.

    Raises:
        RecipeError: the target exists.
        CheckpointError: the round is damaged.
    """
    found = find_checkpoint(round_folder)
    manifest = found.manifest
    tensors = {
        f"{section}.{name}": rows
        for section in ("model", "ema")
        for name, rows in read_section(found.path, manifest, section).items()
    }
    forms = {name: (rows.dtype, tuple(rows.shape)) for name, rows in tensors.items()}
    values = {each.name: getattr(manifest, each.name) for each in fields(SaveInfo)}
    run = {**manifest.recipe["run"], "steps": manifest.step}
    recipe = {**manifest.recipe, "run": run, "federation": None}
    extra = {"count": manifest.extra["count"], "best": manifest.extra["best"]}
    info = replace(SaveInfo(**values), recipe=recipe, extra=extra)
    unfinished = Unfinished(target)
    try:
        unfinished.path.mkdir(parents=True)
        for name in manifest.files:
            if not name.endswith(DATA_SUFFIXES):  # the tokenizer's
                shutil.copyfile(found.path / name, unfinished.path / name)
        write_native(unfinished.path, tensors, forms, info, lambda count: None)
        unfinished.publish()
    except BaseException:
        unfinished.discard()
        raise
