"""Build a model and the step that trains it, each part from its own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels.choose import Kernels, UnavailableKernelsError, choose
from ...kernels.registry import kernels as registered_kernels
from ...model_zoo.config import ModelConfig
from ...model_zoo.language_model import LanguageModel
from ...model_zoo.layout import is_adapter
from ..checkpoint.find import candidates
from ..checkpoint.reader import load_weights
from ..core.errors import Problem, RecipeError
from ..formats.hf_load import load_huggingface
from ..lora.apply import add_adapters, require_adapters
from ..observe.phases import Phase, no_phase
from ..optim.parameters import avoid_dynamo_import, parameter_groups
from ..parallel.axis import LocalParts
from ..parallel.blocks import transform_blocks
from ..parallel.materialize import without_storage
from ..parallel.pipeline.cut import num_micro_batches
from ..parallel.pipeline.measure import measure_costs
from ..parallel.plan import Plan
from ..precision.hardware import DTYPES, LossScale, compute_dtype, dtype_name
from ..precision.products import enable_low_precision
from ..recipe.schema import Recipe
from ..train.balance import Balance
from ..train.step import TrainStep
from ..train.update import Update, UpdateAfterBackward, UpdateInBackward


@dataclass(frozen=True)
class BuiltModel:
    """A model on `meta`, and how its parts were chosen.

    Attributes:
        pieces: what this rank has of it.
    """

    model: LanguageModel
    config: ModelConfig
    kernels: Kernels
    notes: list[str]
    pieces: LocalParts


def build_model(
    recipe: Recipe, vocab_size: int, device: torch.device, plan: Plan | None = None
) -> BuiltModel:
    """Return the recipe's model, or this rank's part of it, without storage, for a device.

    Args:
        recipe: the validated recipe.
        vocab_size: of the tokenizer.
        device: where it will compute.
        plan: how ranks share it; None: it is whole, and not for training.

    Raises:
        RecipeError: its vocabulary is smaller than the tokenizer's, or a kernel that it asks for
            cannot run on the device.
    """
    config = _settle_vocab(recipe.model, vocab_size)
    kernels = choose_kernels(recipe, device.type, trains=plan is not None)
    dtype, why = compute_dtype(recipe.precision, device)
    notes, costs = [f"compute in {dtype_name(dtype)}: {why}"], None
    if plan and plan.measures_cut:
        loss = recipe.loss.build(kernels)
        costs, note = measure_costs(config, kernels, loss, recipe.data, dtype, plan)
        notes.append(note)
    if plan:
        kernels = plan.kernels(kernels, config)
    with without_storage():
        model = config.build(kernels)
        # Adapters before the split: they are divided as the weights that they adapt.
        if recipe.lora.rank:
            notes.append(add_adapters(model, config.layout, recipe.lora))
    if plan and recipe.precision.low_precision:
        notes += enable_low_precision(model, config, recipe.precision.low_precision)
    notes += describe_choices(kernels)
    model.compute_dtype = dtype
    pieces = LocalParts()
    if plan:
        is_split = plan.degrees.tensor > 1
        transform_blocks(model, config.layout, recipe.memory, recipe.compile, is_split=is_split)
        pieces = plan.split(model, config, dtype, DTYPES[recipe.precision.reduce], costs)
        if pieces.cut and recipe.lora.rank:
            require_adapters(model, config.layout, pieces.cut)
    return BuiltModel(model, config, kernels, notes, pieces)


def build_step(
    recipe: Recipe,
    built: BuiltModel,
    plan: Plan,
    sources: Sequence[str] = (),
    phase: Phase = no_phase,
) -> TrainStep:
    """Return the step that trains a model whose weights are in memory.

    Args:
        recipe: the validated recipe.
        built: the model of this rank.
        plan: how ranks share it.
        sources: what metrics call the sources whose losses are reported apart.
        phase: returns the context around a phase of the step.
    """
    model, table = built.model, recipe.data
    share = table.global_batch // plan.degrees.data
    parallel_model = plan.parallelize(
        model,
        built.pieces,
        DTYPES[recipe.precision.reduce],
        seq_len=table.seq_len,
        micro_batches=num_micro_batches(recipe.parallel.pipelining, table.micro_batch, share),
    )
    # After the wrapping: FSDP replaces parameters, and an optimizer must hold the new ones.
    groups = parameter_groups(model.named_parameters(), recipe.optimizer)
    avoid_dynamo_import()
    optimizer = recipe.optimizer.build(groups, plan.device)
    scale = LossScale(model.compute_dtype)
    weight_update: Update = UpdateAfterBackward(
        optimizer, recipe.optimizer.clip_norm, scale, parallel_model, plan.degrees, plan.device
    )
    if recipe.memory.optimizer_in_backward:
        late, ranks = parallel_model.manually_reduced, plan.degrees.world
        weight_update = UpdateInBackward(optimizer, late, ranks, plan.device)
    return TrainStep(
        parallel_model,
        optimizer,
        recipe.loss.build(built.kernels),
        weight_update,
        scale,
        plan.device,
        plan.degrees,
        Balance(model, plan.degrees, table.global_batch, plan.device),
        sources,
        phase,
    )


def load_initial_weights(model: LanguageModel, config: ModelConfig, source: Path) -> list[str]:
    """Load weights only, from one of our checkpoints or a Hugging Face folder; return notes."""
    if source.is_dir() and candidates(source):
        manifest = load_weights(source, model, may_lack=is_adapter)
        return [f"weights from {source} (step {manifest.step})"]
    return [f"weights from {source}", *load_huggingface(source, model, config)]


def _settle_vocab(config: ModelConfig, vocab_size: int) -> ModelConfig:
    config = config.with_vocab(vocab_size)
    if config.vocab < vocab_size:
        raise RecipeError(
            [
                Problem(
                    f"{config.vocab} rows cannot embed the tokenizer's {vocab_size} tokens",
                    key="model.vocab_size",
                    hint="leave it out to take the tokenizer's",
                )
            ]
        )
    return config


def choose_kernels(recipe: Recipe, device_type: str, *, trains: bool = True) -> Kernels:
    """Return the implementation of each operation.

    Args:
        recipe: the run's recipe.
        device_type: "cpu" or "cuda".
        trains: whether the recipe is that of a run on this machine. Where a checkpoint is read, an
            implementation that its recipe names and that cannot run here is replaced by "auto".

    Raises:
        RecipeError: an implementation that the recipe names cannot run on this device or machine.
    """
    compiling = recipe.compile.enabled and recipe.compile.backend == "inductor"
    wanted = {
        operation: name
        for operation, name in recipe.kernels.model_dump().items()
        if trains or name == "auto" or not registered_kernels[operation][name].obstacle(device_type)
    }
    try:
        return choose(wanted, device_type, recipe.data.seq_len, compiling=compiling)
    except UnavailableKernelsError as error:
        raise RecipeError(
            [
                Problem(
                    f'"{wanted[operation]}" cannot run here: {why}',
                    key=f"kernels.{operation}",
                    hint='choose "torch", or leave it to "auto"',
                )
                for operation, why in error.reasons.items()
            ]
        ) from None


def describe_choices(kernels: Kernels) -> list[str]:
    """Return a line for each implementation: its operations, its name, and why it was chosen."""
    operations: dict[str, list[str]] = {}
    for operation, reason in kernels.reasons.items():
        operations.setdefault(reason, []).append(operation)
    return [
        f"{', '.join(names)}: {reason.replace(': ', ' (', 1)})"
        for reason, names in operations.items()
    ]
