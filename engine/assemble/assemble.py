"""Builds the parts of a run from its recipe, and gives each part its own table."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...kernels.choose import Kernels
from ...model_zoo.layout import is_adapter
from ..checkpoint.find import candidates
from ..checkpoint.reader import load_weights
from ..core.errors import Problem, RecipeError
from ..core.heartbeat import heartbeat
from ..corpus.checksums import Share
from ..data.dataset import OpenedData, open_data
from ..data.loader import Loader, iterate_validation
from ..formats.hf_load import load_huggingface
from ..lora.adapter_weights import load_adapter
from ..lora.apply import add_adapters, require_adapters
from ..observe.phases import Phase, PhaseTimer, no_phase
from ..optim.groups import parameter_groups
from ..optim.lean import spare_compiler
from ..parallel.axis import LocalParts
from ..parallel.blocks import transform_blocks
from ..parallel.materialize import materialize, without_storage
from ..parallel.pipeline.cut import num_micro_batches
from ..parallel.pipeline.measure import measure_costs
from ..parallel.plan import Plan, make_plan
from ..precision.hardware import DTYPES, LossScale, compute_dtype, dtype_name, require_formats
from ..precision.products import narrow
from ..train.average import WeightAverage
from ..train.balance import Balance, warn_of_capacity
from ..train.parts import Parts
from ..train.step import TrainStep
from ..train.update import Update, UpdateAfterBackward, UpdateInBackward
from .kernels import choose_kernels, describe_choices

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ..data.batch import Batch
    from ..data.tables import Data
    from ..launch.environment import World
    from ..recipe.schema import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembled(Parts):
    """The parts of a run, and the recipe that they were built from."""

    recipe: Recipe


def assemble(
    recipe: Recipe, world: World, device: torch.device, *, fresh: bool = True
) -> Assembled:
    """Build the parts of a run on this rank.

    Args:
        recipe: the validated recipe.
        world: this process's place among the ranks; the process group exists if there are several.
        device: where this rank computes.
        fresh: fill in initial weights; False leaves them for a checkpoint to fill.

    Raises:
        RecipeError: the recipe does not fit the model, the data or the number of ranks.
        DataError: a source cannot be read.
    """
    heartbeat.enter("assemble")
    if fresh and recipe.lora.rank and not recipe.run.init_from:
        log.warning("lora.rank is given without run.init_from: random weights are frozen")
    require_formats(recipe.precision, recipe.model, device)
    plan = make_plan(recipe.parallel, world.rank, world.world_size, device)
    _apply_determinism(recipe.run.deterministic)
    tokenizer = recipe.tokenizer.build()
    share = Share(world.rank, world.world_size, world.local_rank, world.local_world_size)
    run = recipe.run
    data = open_data(recipe.data, tokenizer, run.seed, f"{run.dir}/{run.name}", share)
    built = build_model(recipe, tokenizer.vocab_size, device, plan)
    model = built.model
    home = torch.device("cpu") if recipe.parallel.fsdp.offload else device
    # The weights of `run.init_from` replace all but those of new adapters.
    fill = fresh and (not recipe.run.init_from or is_adapter)
    materialize(model, home, recipe.run.seed, fill=fill)
    notes = [*filter(None, [world.note]), *built.notes, *data.notes]
    if fresh and recipe.run.init_from:
        notes += load_initial_weights(model, built.config, Path(recipe.run.init_from))
    if fresh and recipe.lora.rank and recipe.lora.init_from:
        notes.append(load_adapter(Path(recipe.lora.init_from), model, built.config, recipe.lora))
    phases = PhaseTimer(device)
    step = build_step(recipe, built, plan, data.train.separate_labels, phases)
    take, rows = partial(plan.take, model=model), loaded_rows(recipe, plan)
    warn_of_capacity(built.config, recipe.data, plan.degrees)
    return Assembled(
        recipe=recipe,
        model_config=built.config,
        tokenizer=tokenizer,
        data=data,
        degrees=plan.degrees,
        parallel_model=step.parallel_model,
        optimizer=step.optimizer,
        average=WeightAverage(model, recipe.ema) if recipe.ema.decay else None,
        step=step,
        phases=phases,
        loader=Loader(data.train, rows, plan.data_rank, plan.degrees.data, take),
        validation=[take(batch) for batch in _validation(recipe, data, plan)],
        total_steps=total_steps(recipe, data),
        device=device,
        world=world,
        schedule=recipe.schedule,
        peak_lr=recipe.optimizer.lr,
        global_batch=recipe.data.global_batch,
        gc_interval=recipe.run.gc_interval,
        evaluate=recipe.evaluate,
        checkpoint=recipe.checkpoint,
        resilience=recipe.resilience,
        notes=notes,
    )


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
        if recipe.lora.rank:
            notes.append(add_adapters(model, config.layout, recipe.lora))
    if plan and recipe.precision.narrow:
        notes += narrow(model, config, recipe.precision.narrow)
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
    groups = parameter_groups(model.named_parameters(), recipe.optimizer)
    spare_compiler()
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


def loaded_rows(recipe: Recipe, plan: Plan) -> Data:
    """Return the data table as this rank's loader shall see it.

    A pipeline takes a rank's rows of a step whole, and cuts them itself.
    """
    if plan.degrees.pipeline == 1:
        return recipe.data
    share = recipe.data.global_batch // plan.degrees.data
    return recipe.data.model_copy(update={"micro_batch": share})


def total_steps(recipe: Recipe, data: OpenedData) -> int:
    """Return how many optimizer steps the run has; an epoch's last, incomplete batch is left out.

    Raises:
        RecipeError: the epochs asked for do not fill one batch.
    """
    if recipe.run.steps is not None:
        return recipe.run.steps
    assert recipe.run.epochs is not None, "validation made sure that one of the two is given"
    rows = int(data.train.rows_per_epoch * recipe.run.epochs)
    steps = rows // recipe.data.global_batch
    if steps == 0:
        message = f"{rows} rows do not fill one batch of {recipe.data.global_batch}"
        raise RecipeError([Problem(message, key="run.epochs", hint="lower data.global_batch")])
    return steps


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


def _validation(recipe: Recipe, data: OpenedData, plan: Plan) -> Iterable[Batch]:
    if not recipe.evaluate.interval or data.validation is None:
        return []
    steps, ranks = recipe.evaluate.steps, plan.degrees.data
    return iterate_validation(data.validation, recipe.data, steps, plan.data_rank, ranks)


def _apply_determinism(wanted: bool) -> None:
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
