"""Turns a round into an ordinary checkpoint, of its weights alone or with optimizer states."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoint.find import find_checkpoint
from ..checkpoint.manifest import DATA_SUFFIXES, Manifest, SaveInfo
from ..checkpoint.tensors import InMemoryTensor, TensorRows
from ..conversion.native import read_section, write_native
from ..core.errors import CheckpointError
from ..core.unfinished import Unfinished
from .federation_state import BUFFER, ERROR, LATE, WEIGHT

_SECTION = re.compile(r"client(\d+)_(\w+)\.")


@dataclass(frozen=True)
class MeanTensor:
    """The mean of tensors of the same shape, in fp32."""

    parts: list[TensorRows]

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.parts[0].shape

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, the last one left out."""
        rows = torch.stack([part.read(first, last).float() for part in self.parts])
        return rows.mean(0).to(self.dtype)


def export_round(round_folder: Path, target: Path, *, with_moments: bool = False) -> None:
    """Write the global weights of a round as a checkpoint that knows of no federation.

    The averaged weights of `[ema]` come along. No rank's memory is needed: tensors are copied piece
    by piece.

    Args:
        round_folder: the checkpoint of the round.
        target: the folder of the checkpoint to write, which must not exist.
        with_moments: whether the optimizer states come along, from which an ordinary run resumes:
            the averaged ones, or the mean of those that clients keep.

    Raises:
        RecipeError: the target exists.
        CheckpointError: the round is damaged, or has no optimizer states.
    """
    found = find_checkpoint(round_folder)
    manifest = found.manifest
    sections = ("model", "ema")
    if with_moments and manifest.contents != "full":
        raise CheckpointError(f"{round_folder} holds weights only", "export another round")
    tensors = {
        f"{section}.{name}": rows
        for section in sections
        for name, rows in read_section(found.path, manifest, section).items()
    }
    extra = {"count": manifest.extra["count"], "best": manifest.extra["best"]}
    if with_moments:
        tensors |= _read_moments(found.path, manifest)
        extra |= _numbers_of(manifest)
    forms = {name: (rows.dtype, tuple(rows.shape)) for name, rows in tensors.items()}
    values = {each.name: getattr(manifest, each.name) for each in fields(SaveInfo)}
    run = {**manifest.recipe["run"], "steps": manifest.step}
    recipe = {**manifest.recipe, "run": run, "federation": None}
    info = replace(SaveInfo(**values), recipe=recipe, extra=extra)
    unfinished = Unfinished(target)
    try:
        unfinished.path.mkdir(parents=True)
        for name in manifest.files:
            if not name.endswith(DATA_SUFFIXES):  # the tokenizer's
                shutil.copyfile(found.path / name, unfinished.path / name)
        contents: Literal["full", "weights"] = "full" if with_moments else "weights"
        write_native(unfinished.path, tensors, forms, info, lambda _: None, contents=contents)
        unfinished.publish()
    except BaseException:
        unfinished.discard()
        raise


def _read_moments(folder: Path, manifest: Manifest) -> dict[str, TensorRows]:
    """Return the optimizer states and the random numbers as an ordinary run saves them.

    Raises:
        CheckpointError: there are no states, as with `client_optimizer = "reset"`.
    """
    sections = {match[0][:-1]: match for match in map(_SECTION.match, manifest.tensors) if match}
    parts: dict[str, list[TensorRows]] = {}
    for section, match in sections.items():
        if match[2] not in (BUFFER, ERROR, WEIGHT, LATE):
            for name, rows in read_section(folder, manifest, section).items():
                parts.setdefault(f"optimizer.{name}.{match[2]}", []).append(rows)
    if not parts:
        shared = read_section(folder, manifest, "optimizer")
        parts = {f"optimizer.{name}": [rows] for name, rows in shared.items()}
    if not parts:
        message = f"{folder} has no optimizer states: clients reset theirs"
        raise CheckpointError(message, "export without --with-moments")
    tensors: dict[str, TensorRows] = {name: MeanTensor(each) for name, each in parts.items()}
    for name in tensors:
        if name.endswith(".step") and not tensors[name].shape:
            # Learning rates and bias corrections follow the steps of the server.
            step = torch.tensor(float(manifest.step), dtype=tensors[name].dtype)
            tensors[name] = InMemoryTensor(step)
    for name, rows in read_section(folder, manifest, "rng").items():
        client, _, kind = name.partition(".")
        if client == "client0":
            tensors[f"rng.{kind}"] = rows
    return tensors


def _numbers_of(manifest: Manifest) -> dict[str, Any]:
    """Return the numbers from which an ordinary run resumes."""
    extra, first = manifest.extra, manifest.extra["federation"]["clients"][0]
    kept = ("schedule", "health", "unevaluated")
    return {
        **{key: extra[key] for key in kept if key in extra},
        "optimizer_numbers": first["optimizer_numbers"] or extra["optimizer_numbers"],
        "loss_scale": first["loss_scale"],
        "streams": {},
    }
