"""Builds the parts of a run from its recipe, and gives each part its own table."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...kernels.vocabulary import VocabularyShard
from ...model_zoo.config import ModelConfig
from ..core.errors import Problem, RecipeError
from ..core.heartbeat import heartbeat
from ..corpus.checksums import Share
from ..data.dataset import Turns
from ..data.loader import TurnLoader
from ..download.hub import resolve_folder
from ..launch.environment import World
from ..lora.adapter_weights import start_magnitudes
from ..lora.peft_folder import load_adapter
from ..lora.tables import LoRA
from ..observe.phases import PhaseTimer
from ..optim.tables import ScheduleConfig
from ..parallel.materialize import materialize
from ..parallel.plan import Plan, make_plan
from ..precision.hardware import require_formats
from ..recipe.schema import Recipe
from ..tasks.metrics.metric_set import MetricSet
from ..tasks.tables import TaskData
from ..train.average import Average, OptimizerAverage, WeightAverage
from ..train.balance import warn_of_capacity
from ..train.lookahead import Lookahead
from ..train.parts import Parts
from .build import BuiltModel, build_model, build_step
from .device_features import require_features
from .frozen import open_frozen
from .initial_weights import load_initial_weights, may_start_fresh, select_weights
from .precomputed import open_outputs
from .splits import open_splits
from .training import open_training

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembled(Parts):
    """The parts of a run, and the recipe that they were built from."""

    recipe: Recipe
    frozen_fingerprint: str
    """what a resumed run must find unchanged of the frozen model; empty: there is none"""
    plan: Plan
    vocabulary: VocabularyShard
    """the tokens whose logits this rank computes"""


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
    for warning in recipe.optimizer.warnings():
        log.warning(warning)
    require_formats(recipe.precision, recipe.model, device)
    require_features(recipe, device)
    plan = make_plan(recipe.parallel, world.rank, world.world_size, device)
    # Before the first product: cuBLAS reads its workspace setting when it starts.
    _apply_determinism(recipe.run.deterministic)
    tokenizer = recipe.tokenizer.build()
    share = Share(world.rank, world.world_size, world.local_rank, world.local_world_size)
    run = recipe.run
    opening = TaskData(recipe.data, tokenizer, run.seed, str(run.folder), share, recipe.loss)
    data = open_training(recipe.task, opening, has_dropout=recipe.lora.dropout > 0)
    outputs = open_outputs(recipe, tokenizer, share)
    if outputs:
        outputs.require(data.turns[0].opened, recipe.data)
    # Sizes of memory and of kernels are those of the largest micro batch.
    sized = recipe.for_largest_split()
    # The model is split on the meta device and filled afterwards, so that no rank ever holds the
    # whole of a sharded model.
    built = build_model(sized, tokenizer.vocab_size, device, plan)
    model = built.model
    home = torch.device("cpu") if recipe.parallel.fsdp.offload else device
    frozen_blocks = _describe_frozen(recipe.task.name, built.config)
    notes = [*filter(None, [world.note, frozen_blocks]), *built.notes, *data.notes]
    notes += _fill_weights(recipe, built, home, fresh=fresh)
    frozen, fingerprint = open_frozen(sized, tokenizer, device, plan, notes)
    phases = PhaseTimer(device)
    step = build_step(sized, built, plan, tokenizer, data.separate_labels, phases, frozen)
    if outputs:
        fingerprint = outputs.fingerprint
        (turn,) = data.turns  # a recipe with splits is refused
        opened = outputs.attach_all(turn.opened, recipe.data, step.task.batch_class)
        data = replace(data, turns=[turn._replace(opened=opened)])
    take = partial(plan.take, model=model)
    warn_of_capacity(built.config, sized.data, plan.degrees)
    metrics = _metrics(recipe, plan, world.rank, built.config)
    steps, ahead = total_steps(recipe, data), recipe.ema.nesterov
    return Assembled(
        recipe=recipe,
        model_config=built.config,
        tokenizer=tokenizer,
        data=data,
        frozen_fingerprint=fingerprint,
        plan=plan,
        vocabulary=built.kernels.vocabulary,
        degrees=plan.degrees,
        parallel_model=step.parallel_model,
        optimizer=step.optimizer,
        average=_average(recipe, model, step.optimizer, steps),
        lookahead=Lookahead(model, ahead, steps) if ahead.scale else None,
        step=step,
        phases=phases,
        loader=TurnLoader(
            data,
            plan.data_rank,
            plan.degrees.data,
            take,
            takes_whole_steps=plan.degrees.pipeline > 1,
        ),
        splits=open_splits(
            recipe,
            data.validation,
            replace(opening, run="", loss=None),
            plan,
            replace(step.task, keeps_predictions=metrics is not None),
            metrics,
            take,
            outputs,
        ),
        total_steps=steps,
        steps_per_epoch=data.steps_per_epoch,
        device=device,
        world=world,
        schedule=_settle_schedule(recipe, data),
        peak_lr=recipe.optimizer.lr,
        named_rates=recipe.optimizer.named_rates(),
        stride=recipe.federation.steps_of(recipe.data) if recipe.federation else 1,
        gc_interval=recipe.run.gc_interval,
        evaluate=recipe.evaluate.settle(recipe.task.scores),
        checkpoint=recipe.checkpoint,
        resilience=recipe.resilience,
        notes=notes,
    )


def _fill_weights(
    recipe: Recipe, built: BuiltModel, home: torch.device, *, fresh: bool
) -> list[str]:
    """Give the model storage, and its initial weights where the run is fresh; return notes."""
    run = recipe.run
    # The weights of `run.init_from` replace all but those of new adapters and heads, and those that
    # `run.init` leaves out.
    excludes = select_weights(run.init).excludes
    fill = fresh and (not run.init_from or (lambda name: may_start_fresh(name) or excludes(name)))
    materialize(built.model, home, run.seed, fill=fill)
    notes: list[str] = []
    if fresh and run.init_from:
        grows, start = recipe.has_own_vocabulary, resolve_folder(run.init_from)
        notes += load_initial_weights(built.model, built.config, start, run.init, may_grow=grows)
    if fresh and recipe.lora.rank:
        notes += _start_adapters(built, recipe.lora)
    return notes


def _start_adapters(built: BuiltModel, table: LoRA) -> list[str]:
    """Fill adapters from a folder, and magnitudes that still have no values; return notes."""
    notes = []
    if table.init_from:
        folder = resolve_folder(table.init_from)
        notes.append(load_adapter(folder, built.model, built.config, table))
    if table.dora:
        start_magnitudes(built.model)
    return notes


def total_steps(recipe: Recipe, turns: Turns) -> int:
    """Return how many optimizer steps the run has; an epoch's last, incomplete batch is left out.

    Raises:
        RecipeError: the epochs asked for do not fill one batch.
    """
    if recipe.federation and recipe.federation.rounds:
        return recipe.federation.rounds * recipe.federation.steps_of(recipe.data)
    if recipe.run.steps is not None:
        return recipe.run.steps
    assert recipe.run.epochs is not None, "validation made sure that one of the two is given"
    rows = int(turns.epoch_samples * recipe.run.epochs)
    steps = turns.find_batch(rows)
    if steps == 0:
        message = f"{rows} rows do not fill one batch of {turns.turns[0].table.global_batch}"
        raise RecipeError([Problem(message, key="run.epochs", hint="lower data.global_batch")])
    return steps


def _describe_frozen(task: str, model: ModelConfig) -> str:
    """Return a line that says which blocks a task leaves untrained; empty: none."""
    blocks = [prefix.removesuffix(".") for prefix in model.frozen_prefixes]
    trains = f'the task "{task}" trains no further predictions'
    return f"{trains}: frozen are {', '.join(blocks)}" if blocks else ""


def _settle_schedule(recipe: Recipe, turns: Turns) -> ScheduleConfig:
    """Return the schedule with its warmup in steps.

    Raises:
        RecipeError: a warmup in epochs is longer than the run, or a schedule follows the score of a
            validation split that is empty.
    """
    schedule = recipe.schedule.settle(turns.steps_per_epoch, recipe.optimizer.lr)
    steps = total_steps(recipe, turns)
    if schedule.warmup_epochs is not None and schedule.warmup_steps > steps:
        message = f"{schedule.warmup_epochs:g} epochs are {schedule.warmup_steps} steps"
        message += f", more than the {steps} of the run"
        raise RecipeError([Problem(message, key="schedule.warmup_epochs")])
    if schedule.follows_score and recipe.evaluate.follows_validation and not turns.validation:
        message = f'the schedule "{schedule.name}" follows {recipe.evaluate.metric} of the '
        message += "validation split, and nothing is held out"
        hint = "raise data.validation_fraction, or name a split in evaluate.metric"
        raise RecipeError([Problem(message, key="schedule.name", hint=hint)])
    return schedule


def _average(
    recipe: Recipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> Average | None:
    """Return the average that is evaluated; None where that is the weights themselves."""
    if recipe.optimizer.averages_weights:
        schedule: Any = recipe.schedule
        if schedule.name != "constant":
            log.warning(
                'optimizer.name = "%s" needs no schedule, and "%s" lowers the rate too: take '
                '"constant" with warmup_steps',
                recipe.optimizer.name,
                schedule.name,
            )
        average_of: Any = optimizer
        return OptimizerAverage(model, average_of.average)
    return WeightAverage(model, recipe.ema, steps) if recipe.ema.decay else None


def _metrics(recipe: Recipe, plan: Plan, rank: int, model: ModelConfig) -> MetricSet | None:
    """Return the metrics of a validation; None without any, or without evaluations."""
    outputs = recipe.task.outputs(recipe.loss)
    if outputs is None or not recipe.evaluate.metrics or not recipe.evaluate.is_enabled:
        return None
    if not outputs.has_scores:
        outputs = replace(outputs, num_classes=model.vocab)
    # Ranks of the tensor axis, the last one of the mesh, have the same outputs.
    is_first = rank % plan.degrees.tensor == 0
    return MetricSet(recipe.evaluate.metrics, outputs, plan.device, counts=is_first)


def _apply_determinism(wanted: bool) -> None:
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
