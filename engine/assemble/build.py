"""Build a model and the step that trains it, each part from its own table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.choose import Kernels
from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ..core.errors import Problem, RecipeError
from ..core.softcaps import check_softcap
from ..lora.apply import add_adapters, require_adapters
from ..observe.monitors.monitored_model import MonitoredModel
from ..observe.monitors.monitors import Monitors
from ..observe.phases import Phase, no_phase
from ..parallel.axis import LocalParts, ParallelModel
from ..parallel.blocks import open_compiler, transform_blocks
from ..parallel.materialize import without_storage
from ..parallel.pipeline.cut import num_micro_batches
from ..parallel.pipeline.measure import measure_costs
from ..parallel.placement import shards_experts
from ..parallel.plan import Plan
from ..precision.choose import float8_layers
from ..precision.hardware import DTYPES, LossScale, compute_dtype, dtype_name
from ..precision.products import enable_low_precision
from ..recipe.schema import Recipe
from ..tasks.frozen import FrozenModel, base_alone
from ..tasks.tables import TaskSettings
from ..tasks.task import Task
from ..tokenizers.tokenizer import Tokenizer
from ..train.balance import Balance
from ..train.step import TrainStep
from .kernel_choice import choose_kernels, describe_choices, require_fused
from .update import build_update


@dataclass(frozen=True)
class BuiltModel:
    """A model on `meta`, and how its parts were chosen.

    Attributes:
        pieces: what this rank has of it.
    """

    model: Model
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
    config = _settle_vocab(recipe, vocab_size + recipe.task.extra_tokens)
    kernels = choose_kernels(recipe, device.type, trains=plan is not None)
    _require_softcaps(kernels, config)
    # Before the cut of a pipeline is measured, which computes losses.
    compiled = kernels.reasons["linear_cross_entropy"].startswith("compiled:")
    compiler = (
        open_compiler(recipe.compile, recipe.memory, plan.sharing, compiles_loss=compiled)
        if plan
        else None
    )
    dtype, why = compute_dtype(recipe.precision, device)
    notes, costs = [f"compute in {dtype_name(dtype)}: {why}"], None
    if plan and plan.measures_cut:
        task = build_task(recipe, kernels, config)
        costs, note = measure_costs(config, kernels, task, recipe.data, dtype, plan)
        notes.append(note)
    if plan:
        kernels = plan.kernels(kernels, config)
    with without_storage():
        model = config.build(kernels)
        # Adapters before the split: they are divided as the weights that they adapt.
        if recipe.lora.rank:
            notes.append(add_adapters(model, config.layout, recipe.lora))
        if recipe.precision.parameters == "bf16":
            for weight in model.parameters():
                weight.data = weight.data.to(torch.bfloat16)
        _freeze_layers(model, recipe)
    if plan and recipe.precision.low_precision:
        notes += enable_low_precision(
            model,
            config,
            recipe.precision.low_precision,
            keeps_experts=not shards_experts(recipe.parallel, plan.degrees),
        )
    if kernels.moe is not None:
        require_fused(model)
    notes += describe_choices(kernels, ragged=recipe.data.packing == "ragged")
    model.compute_dtype = dtype
    pieces = LocalParts()
    if plan:
        describe, sharing = config.describe_block, plan.sharing
        transform_blocks(model, config.layout, recipe.memory, compiler, sharing, describe)
        narrow = float8_layers(recipe.precision.float8, config)
        reduce = DTYPES[recipe.precision.reduce]
        pieces = plan.split(model, config, dtype, reduce, costs, narrow)
        if pieces.cut and recipe.lora.rank:
            require_adapters(model, config.layout, pieces.cut)
    return BuiltModel(model, config, kernels, notes, pieces)


def _freeze_layers(model: Model, recipe: Recipe) -> None:
    """Let nothing train the layers that a federation freezes."""
    for name, weight in model.named_parameters():
        policy = recipe.federation and recipe.federation.policy_of(name)
        if policy and policy.policy == "freeze":
            weight.requires_grad_(False)


def build_step(
    recipe: Recipe,
    built: BuiltModel,
    plan: Plan,
    tokenizer: Tokenizer | None = None,
    sources: Sequence[str] = (),
    phase: Phase = no_phase,
    frozen: FrozenModel | None = None,
) -> TrainStep:
    """Return the step that trains a model whose weights are in memory.

    Args:
        recipe: the validated recipe.
        built: the model of this rank.
        plan: how ranks share it.
        tokenizer: the recipe's tokenizer; None where nothing is trained.
        sources: what metrics call the sources whose losses are reported apart.
        phase: returns the context around a phase of the step.
        frozen: the frozen model of the task, if it has one of its own.
    """
    model, table = built.model, recipe.data
    share = table.global_batch // plan.degrees.data
    parallel_model = plan.parallelize(
        model,
        built.pieces,
        DTYPES[recipe.precision.reduce],
        num_positions=table.seq_len,
        micro_batches=num_micro_batches(recipe.parallel.pipelining, table.micro_batch, share),
    )
    if frozen is None and recipe.lora.rank and recipe.task.frozen_model(recipe.loss) == "":
        frozen = FrozenModel(parallel_model, built.config, base_alone)
    # After the wrapping: FSDP replaces parameters, and an optimizer must hold the new ones.
    scale = LossScale(model.compute_dtype)
    optimizer, weight_update = build_update(recipe, parallel_model, built.config, plan, scale)
    return TrainStep(
        parallel_model,
        optimizer,
        build_task(recipe, built.kernels, built.config, tokenizer, sources, frozen),
        weight_update,
        scale,
        plan.device,
        plan.degrees,
        Balance(model, plan.degrees, plan.device),
        phase,
        Monitors(recipe.metrics.monitors, _monitored(parallel_model, plan)),
    )


def _monitored(parallel_model: ParallelModel, plan: Plan) -> MonitoredModel:
    """Return what monitors measure of this rank's part of a model."""
    model, duplicates = parallel_model.model, set(map(id, parallel_model.duplicate_parameters))
    parameters = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and id(weight) not in duplicates
    }
    names = {*model.remote_parameters, *(name for name, _ in model.named_parameters())}
    holders = plan.degrees.world // plan.degrees.pipeline
    return MonitoredModel(model, parameters, names, holders, plan.device)


def build_task(
    recipe: Recipe,
    kernels: Kernels,
    model: ModelConfig,
    tokenizer: Tokenizer | None = None,
    sources: Sequence[str] = (),
    frozen: FrozenModel | None = None,
) -> Task[Any]:
    """Return the recipe's task; see `TaskSettings` for the arguments."""
    return recipe.task.build(
        TaskSettings(recipe.loss, kernels, recipe.data, model, tokenizer, sources, frozen)
    )


def _settle_vocab(recipe: Recipe, vocab_size: int) -> ModelConfig:
    config = recipe.model.with_vocab(vocab_size)
    if 0 < config.vocab < vocab_size:  # 0: the model embeds no tokens
        message = f"{config.vocab} rows cannot embed the tokenizer's {vocab_size} tokens"
        hint = f"set model.vocab_size = {vocab_size}"
        if recipe.run.init_from:
            hint += ": the weights of run.init_from then get the rows that they lack"
        raise RecipeError([Problem(message, key="model.vocab_size", hint=hint)])
    return config


def _require_softcaps(kernels: Kernels, config: ModelConfig) -> None:
    problems = []
    caps = {
        "attention": ("attention scores", getattr(config, "score_softcap", None)),
        "linear_cross_entropy": ("logits", getattr(config, "head_softcap", None)),
    }
    for operation, (capped, softcap) in caps.items():
        function = getattr(kernels, operation)
        if operation == "attention":  # `attend`, whose first argument is the implementation
            (function,) = function.args
        if softcap is not None:
            name = kernels.reasons[operation].partition(":")[0]
            problems += check_softcap(function, capped, f"kernels.{operation}", name)
    if problems:
        raise RecipeError(problems)
