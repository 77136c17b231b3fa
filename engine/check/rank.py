"""Computes some steps of a recipe as one rank, and measures how far they are from a reference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..assemble.build import build_model, build_step
from ..assemble.frozen import build_frozen_parts
from ..assemble.training import open_training
from ..core.local import is_split
from ..corpus.checksums import Share
from ..data.batch import IGNORED, Batch
from ..data.loader import TurnLoader
from ..lora.adapter_weights import start_magnitudes
from ..parallel.materialize import materialize
from ..parallel.plan import Plan, make_plan
from ..recipe.schema import Recipe
from ..tasks.frozen import FrozenModel
from ..tasks.tables import TaskData
from ..train.step import TrainStep
from .jobs import Distance, PlanJob, StepDistances
from .workers import Report

CPU = torch.device("cpu")
GROUP_SECONDS = 600.0
SMALLEST = 1e-6
"""of the largest gradient of a step: below it, a gradient is compared with this share"""


@contextmanager
def process_group(rank: int, ranks: int, store: str) -> Iterator[None]:
    """Be a rank of a gloo group, if there are several."""
    torch.set_num_threads(1)
    # Gradients of several axes are gathered one axis after the other, of which torch warns.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    if ranks == 1:
        yield
        return
    timeout = timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout
    )
    # After an error nothing is destroyed: other ranks may wait, and all processes are ended.
    yield
    dist.barrier()  # a rank that leaves early breaks the last collective of the others
    dist.destroy_process_group()


def run_job(rank: int, ranks: int, report: Report, job: PlanJob) -> list[StepDistances]:
    """Compute steps, write them as the reference or not, and compare them with the reference."""
    if job.recipe.precision.compute == "fp64":  # type: ignore[comparison-overlap] # of checks alone
        torch.set_default_dtype(torch.float64)
    report("assemble")
    step, loader = _assemble(rank, ranks, report, job)
    known = {} if job.writes else dict(np.load(job.reference, allow_pickle=False))
    found: dict[str, Any] = {}
    distances = []
    for number, batches in enumerate(islice(loader.steps(0), job.steps)):
        report(f"step {number + 1}")
        results = step.accumulate([_widen(batch) for batch in batches], 1.0)
        report(f"step {number + 1}, gather gradients")
        losses = torch.stack([results.loss, results.total_loss]).double().numpy()
        loads = {name: load.numpy().copy() for name, load in step.balance.loads().items()}
        gradients = dict(_whole_gradients(step))
        step.update(1.0)
        step.clear()
        found |= {f"{number}/loss": losses}
        found |= {f"{number}/load/{name}": load for name, load in loads.items()}
        found |= {f"{number}/gradient/{name}": x for name, x in gradients.items()}
        distances.append(_compare(f"{number}/", known or found, losses, loads, gradients))
    if job.writes:
        np.savez(job.reference, **found)
    return distances


def _assemble(rank: int, ranks: int, report: Report, job: PlanJob) -> tuple[TrainStep, TurnLoader]:
    """Build the step of a rank, and what reads its batches, as the run would."""
    recipe = job.recipe
    plan = make_plan(recipe.parallel, rank, ranks, CPU)
    tokenizer = recipe.tokenizer.build()
    share = Share(rank, ranks, rank, ranks)
    opening = TaskData(recipe.data, tokenizer, recipe.run.seed, "", share, recipe.loss)
    data = open_training(recipe.task, opening, has_dropout=recipe.lora.dropout > 0)
    built = build_model(recipe, tokenizer.vocab_size, CPU, plan)
    model = built.model
    materialize(model, CPU, recipe.run.seed)
    if recipe.lora.dora:
        start_magnitudes(model)
    frozen = _open_frozen(recipe, tokenizer.vocab_size, plan)
    report("wrap the model")

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        report(name)
        yield

    step = build_step(recipe, built, plan, tokenizer, data.separate_labels, phase, frozen)
    take = partial(plan.take, model=model)
    loader = TurnLoader(
        data,
        plan.data_rank,
        plan.degrees.data,
        (lambda batch: take(_hide_labels(batch))) if job.hides_labels else take,
        takes_whole_steps=plan.degrees.pipeline > 1,
    )
    return step, loader


def _open_frozen(recipe: Recipe, vocab_size: int, plan: Plan) -> FrozenModel | None:
    """Return a frozen model of random weights, other ones than training starts from."""
    place = recipe.task.frozen_model(recipe.loss)
    if place is None or (recipe.lora.rank and not recipe.task.needs_frozen):
        return None
    run = recipe.run.model_copy(update={"seed": recipe.run.seed + 1})
    parts = build_frozen_parts(recipe.model_copy(update={"run": run}), vocab_size, CPU, plan)
    parts.materialize(CPU)
    return parts.wrap()


def _hide_labels(batch: Batch) -> Batch:
    """Return whole rows without the labels of some tokens, which are the same on all ranks."""
    columns = batch.columns()
    labels, tokens = columns["labels"], columns["tokens"]
    # By the number of the token: rows have unequal numbers of each.
    return replace(batch, labels=labels.where(tokens % 3 != 0, IGNORED))  # type: ignore[call-arg]


def _widen(batch: Batch) -> Batch:
    """Return a batch whose numbers have the dtype of the step: files hold them in fp32."""
    return batch.to_dtype(torch.get_default_dtype())


def _whole_gradients(step: TrainStep) -> Iterator[tuple[str, Any]]:
    """Yield each gradient that this rank has a part of, whole; all ranks call it."""
    for name, weight in step.parallel_model.model.named_parameters():
        if not weight.requires_grad:
            continue
        gradient: Any = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        whole: Tensor = gradient.full_tensor() if is_split(gradient) else gradient
        yield name, whole.detach().double().clone().numpy()


def _compare(
    prefix: str,
    known: dict[str, Any],
    losses: Any,
    loads: dict[str, Any],
    gradients: dict[str, Any],
) -> StepDistances:
    """Return the distances of a step from the reference's with this prefix of keys."""
    start = f"{prefix}gradient/"
    wanted = {key.removeprefix(start): x for key, x in known.items() if key.startswith(start)}
    largest = max((float(np.abs(x).max(initial=0.0)) for x in wanted.values()), default=0.0)
    expected = known[f"{prefix}loss"]
    return StepDistances(
        len(loads),
        [n for n, load in loads.items() if not np.array_equal(load, known[f"{prefix}load/{n}"])],
        float((np.abs(losses - expected) / np.maximum(np.abs(expected), 1e-300)).max()),
        {
            name: _distance(gradient, wanted[name], SMALLEST * largest)
            for name, gradient in gradients.items()
        },
    )


def _distance(gradient: Any, wanted: Any, least: float) -> Distance:
    difference = gradient - wanted
    scale = max(float(np.abs(wanted).max(initial=0.0)), least, 1e-300)
    relative = float(np.abs(difference).max(initial=0.0)) / scale
    # NaN is no small distance.
    relative = relative if np.isfinite(relative) else float("inf")
    return Distance(relative, float(np.square(difference).sum()), float(np.square(wanted).sum()))
