"""Builds the frozen model that a task learns from: a teacher, or the reference of preferences."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash

from ..checkpoint.find import candidates
from ..checkpoint.manifest import Manifest
from ..core.errors import Problem, RecipeError
from ..core.files import open_regular
from ..download.hub import resolve_folder
from ..formats.hf_folder import list_tensors
from ..formats.titan_folder import is_titan_folder, list_files
from ..lora.tables import LoRA
from ..parallel.materialize import materialize
from ..parallel.plan import Plan
from ..parallel.rules import select_matching
from ..parallel.tables import Memory
from ..precision.hardware import DTYPES
from ..precision.tables import MX, Float8
from ..recipe.schema import Recipe
from ..recipe.tables import Run
from ..tasks.frozen import FrozenModel
from ..tokenizers.tokenizer import Tokenizer
from .build import BuiltModel, build_model
from .found_model import FoundModel, find_model
from .initial_weights import load_initial_weights

FINGERPRINT_BYTES = 2**20
"""of each end of a file"""


@dataclass(frozen=True)
class FrozenParts:
    """A frozen model on the meta device.

    Attributes:
        recipe: the recipe, with the frozen model in place of the one that is trained.
        built: this rank's part of the model.
        plan: how ranks share it.
        source: where its weights are; None: they are those that training starts from.
    """

    recipe: Recipe
    built: BuiltModel
    plan: Plan
    source: FoundModel | None

    def materialize(self, device: torch.device, *, fill: bool = True) -> list[str]:
        """Give the model its memory and its weights, and return notes.

        Args:
            device: where the weights are kept.
            fill: False leaves the weights as they are, for a simulation.
        """
        model, run = self.built.model, self.recipe.run
        # All of them, although a checkpoint may replace them: `run.init` may leave some out.
        materialize(model, device, run.seed, fill=fill and self.source is None)
        model.requires_grad_(False)
        model.eval()
        config, notes = self.built.config, list[str]()
        if fill and self.source:
            notes = load_initial_weights(model, config, self.source.path)
        elif fill and run.init_from:
            grows, start = self.recipe.has_own_vocabulary, resolve_folder(run.init_from)
            notes = load_initial_weights(model, config, start, run.init, may_grow=grows)
        return [f"frozen model: {note}" for note in notes]

    def wrap(self) -> FrozenModel:
        """Return the model, ready to compute."""
        table, recipe = self.recipe.data, self.recipe
        # DDP reduces gradients, and refuses a model that has none.
        axes = tuple(axis for axis in self.plan.axes if not axis.only_reduces_gradients)
        parallel_model = replace(self.plan, axes=axes).parallelize(
            self.built.model,
            self.built.pieces,
            DTYPES[recipe.precision.reduce],
            num_positions=table.seq_len,
            micro_batches=1,
        )
        return FrozenModel(parallel_model, self.built.config)

    @property
    def fingerprint(self) -> str:
        """What a resumed run must find unchanged."""
        if self.source is not None:
            return fingerprint_weights(self.source.path)
        return fingerprint_start(self.recipe.run)


def open_frozen(
    recipe: Recipe, tokenizer: Tokenizer, device: torch.device, plan: Plan, notes: list[str]
) -> tuple[FrozenModel | None, str]:
    """Return the frozen model of a recipe's task with its weights, and its fingerprint.

    Args:
        recipe: the validated recipe.
        tokenizer: the tokenizer of the recipe.
        device: where the model will compute.
        plan: how ranks share the model that is trained, and this one.
        notes: gets lines for the user.

    Raises:
        RecipeError, CheckpointError: see `build_frozen`.
    """
    parts = build_frozen(recipe, tokenizer.vocab_size, tokenizer.fingerprint, device, plan)
    if parts is None:
        return None, ""
    home = torch.device("cpu") if recipe.parallel.fsdp.offload else device
    notes += parts.materialize(home)
    return parts.wrap(), parts.fingerprint


def build_frozen(
    recipe: Recipe, vocab_size: int, tokenizer: str, device: torch.device, plan: Plan
) -> FrozenParts | None:
    """Return the frozen model of a recipe's task on the meta device.

    Args:
        recipe: the validated recipe.
        vocab_size: of the tokenizer.
        tokenizer: the fingerprint of the tokenizer; empty where it is not compared.
        device: where the model will compute.
        plan: how ranks share the model that is trained, and this one.

    Returns:
        the model; None where the task needs none, or adapters are switched off instead.

    Raises:
        RecipeError: the frozen model has another tokenizer or vocabulary, or takes no ragged rows.
        CheckpointError: there is no model at the place that the task names.
    """
    place = recipe.task.frozen_model(recipe.loss)
    if place is None or (not place and recipe.lora.rank):
        return None
    key = f"task.{recipe.task.frozen_key}"
    if not place and recipe.task.needs_frozen:
        hint = "name a run, one of its checkpoints, or a Hugging Face folder"
        raise RecipeError([Problem("is missing", key, hint=hint)])
    source = find_model(place, recipe.plugins.modules) if place else None
    if source and source.manifest and tokenizer not in ("", source.manifest.tokenizer):
        message = f"{source.path} was trained with another tokenizer"
        raise RecipeError([Problem(message, key, hint="give it the tokenizer of this recipe")])
    model = source.recipe.model if source else recipe.model
    vocabs = [config.with_vocab(vocab_size).vocab for config in (recipe.model, model)]
    if vocabs[0] != vocabs[1]:
        message = f"{place} has {vocabs[1]} tokens, and the model that is trained {vocabs[0]}"
        hint = f"set model.vocab_size = {vocabs[1]}" if vocabs[1] > vocabs[0] else ""
        raise RecipeError([Problem(message, key, hint=hint)])
    if recipe.data.packing == "ragged" and not model.takes_lengths:
        message = f'{place} is a "{model.name}", which takes rows of one length only'
        raise RecipeError([Problem(message, key, hint='take data.packing = "none"')])
    return build_frozen_parts(recipe, vocab_size, device, plan, source)


def build_frozen_parts(
    recipe: Recipe,
    vocab_size: int,
    device: torch.device,
    plan: Plan,
    source: FoundModel | None = None,
) -> FrozenParts:
    """Return a frozen model on the meta device.

    Args:
        recipe: the validated recipe.
        vocab_size: of the tokenizer.
        device: where the model will compute.
        plan: how ranks share the model that is trained, and this one.
        source: where its weights are; None: it is the recipe's own model, before training.
    """
    # It is only evaluated, and so has no use of further predictions.
    model = (source.recipe.model if source else recipe.model).freeze_predictions()
    precision = recipe.precision.model_copy(update={"float8": Float8(), "mx": MX()})
    pipelining = recipe.parallel.pipelining.model_copy(update={"cost": "estimated"})
    parallel = recipe.parallel.model_copy(update={"pipelining": pipelining})
    parallel = select_matching(parallel, model.with_vocab(vocab_size).parameter_shapes())
    own = {"model": model, "lora": LoRA(), "memory": Memory(), "precision": precision}
    recipe = recipe.model_copy(update={**own, "parallel": parallel})
    plan = replace(plan, table=parallel)
    built = build_model(recipe, vocab_size, device, plan)
    return FrozenParts(recipe, built, plan, source)


def fingerprint_start(run: Run) -> str:
    """Return a text that changes if the weights that training starts from do."""
    return (
        fingerprint_weights(resolve_folder(run.init_from)) if run.init_from else f"seed {run.seed}"
    )


def fingerprint_weights(path: Path) -> str:
    """Return a text that changes if the weights at a path do; see `fingerprint_folder`."""
    if not candidates(path):
        return fingerprint_folder(path)
    manifest = find_model(path).manifest
    assert manifest is not None, "a checkpoint has one"
    return fingerprint_manifest(manifest)


def fingerprint_manifest(manifest: Manifest) -> str:
    """Return a text that changes if the files of a checkpoint do."""
    files = sorted((name, entry["xxh3"]) for name, entry in manifest.files.items())
    return xxhash.xxh3_128_hexdigest(repr(files).encode())


def fingerprint_folder(folder: Path) -> str:
    """Return a text that changes if the weights of Hugging Face's or torchtitan's folder do.

    Names, shapes, places and sizes are compared, and of each file the first and the last MiB:
    reading all of a large model at every start would take minutes.
    """
    digest = xxhash.xxh3_128()
    if is_titan_folder(folder):
        tensors, files = {}, list_files(folder)
    else:
        tensors = list_tensors(folder)
        files = sorted({each.file for each in tensors.values()})
    for name in sorted(tensors):
        each = tensors[name]
        place = f"{name} {each.file.name} {each.dtype} {each.shape} {each.offset}\n"
        digest.update(place.encode())
    for file in files:
        with open_regular(file) as opened:
            digest.update(opened.read(FINGERPRINT_BYTES))
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(f"{size} ".encode() + opened.read(FINGERPRINT_BYTES))
    return digest.hexdigest()
