"""Trains a row of the speedrun until the validation loss reaches the target."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer import assemble, load_recipe, validate
from trainer.engine.train.parts import Position

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes/speedrun"
TARGET = 1.85
"""validation loss in nats a byte"""
FIRST_EVALUATION = 50
"""no row is at the target before this step"""
MOST_CPU_SECONDS = 40.0


@dataclass(frozen=True)
class Outcome:
    """What one run reached.

    Attributes:
        seed: the run's seed, of the initial weights and of the order of the data.
        length: optimizer steps of the run, after which the schedule ends.
        steps: the first evaluated step whose loss is at most the target; None: there is none.
        loss: the last validation loss; infinite after a loss that is not a number.
        cpu_seconds: CPU time of training and evaluation.
    """

    seed: int
    length: int
    steps: int | None
    loss: float
    cpu_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the numbers for a file of JSON lines."""
        return asdict(self)


def rows() -> list[str]:
    """Return the names of all rows: the recipes of the speedrun."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def run_row(row: str, overrides: Mapping[str, Any], seed: int) -> Outcome:
    """Train a row from its initial weights until it reaches the target, or to its last step.

    Args:
        row: the name of the recipe.
        overrides: values that replace those of the recipe, by key.
        seed: the run's seed.
    """
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPES / f"{row}.toml", {**overrides, "run.seed": seed})
    parts, position = assemble(recipe), Position()
    batches = parts.loader.steps(0)
    start, steps, loss = time.process_time(), None, math.inf
    while position.step < parts.total_steps and steps is None:
        factor = parts.start_step(position)
        parts.step.accumulate(next(batches), factor)
        parts.step.update(factor)
        parts.step.clear()
        position.step += 1
        position.batch += 1
        parts.finish_step(position.step)
        is_due = position.step % recipe.evaluate.interval == 0 and position.step >= FIRST_EVALUATION
        if not is_due and position.step < parts.total_steps:
            continue
        loss = validate(parts)["loss"]
        if not math.isfinite(loss):
            loss = math.inf
            break
        if loss <= TARGET:
            steps = position.step
    seconds = time.process_time() - start
    return Outcome(seed, parts.total_steps, steps, loss, round(seconds, 2))
