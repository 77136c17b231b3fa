"""Compares cells with one process, and records which ones passed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cells.draw import Cell, draw
from trainer.engine.check.adapt import adapt
from trainer.engine.check.check_plan import find_difference, merge
from trainer.engine.check.jobs import COMPUTE, PlanJob, StepDistances
from trainer.engine.check.shrink import on_one_process
from trainer.engine.check.workers import RankPool
from trainer.engine.core.errors import TrainerError
from trainer.engine.parallel.tables import Compile, Memory
from trainer.engine.recipe.schema import Recipe


def compare(cell: Cell, pool: RankPool) -> str:
    """Return what a cell's ranks compute differently from one process; empty: nothing."""
    adapted, _ = adapt(cell.recipe, pool.folder, as_is=False)
    given = {"memory": cell.recipe.memory, "compile": cell.recipe.compile}
    recipe = adapted.model_copy(update=given)
    # Plain: no plan, every activation kept, nothing compiled.
    plain = {"memory": Memory(), "compile": Compile()}
    single = on_one_process(recipe).model_copy(update=plain)
    job = PlanJob(recipe, str(pool.folder / "reference.npz"), hides_labels=cell.number % 4 == 0)
    if recipe.task.name not in ("language_modeling", "distillation"):
        job = job._replace(hides_labels=False)

    def measure(recipe: Recipe, ranks: int, writes: bool = False) -> list[StepDistances]:
        found = pool.run(ranks, COMPUTE, job._replace(recipe=recipe, writes=writes))
        return [merge(steps) for steps in zip(*found, strict=True)]

    reference = measure(single, 1, writes=True)
    difference = find_difference(reference, measure(recipe, cell.world))
    return f"{difference}" if difference else ""


def run_cell(number: int, silence_seconds: float = 300.0) -> str:
    """Return why a cell fails; empty: it passes."""
    cell = draw(number)
    with RankPool(silence_seconds) as pool:
        try:
            found = compare(cell, pool)
        except TrainerError as error:
            found = error.render()
    if not found:
        return ""
    again = f"python -m tests.cells run {number}"
    return f"cell {number} ({cell.describe()}): {found}\n  again: {again}"


def run_cells(numbers: Iterable[int], results: Path | None, jobs: int) -> list[str]:
    """Compare cells, skip those that passed before, and return the failures.

    Args:
        numbers: the cells.
        results: the file with a line for each cell that was compared; None keeps none.
        jobs: how many cells at a time.
    """
    known = read_results(results) if results else {}
    left = [number for number in numbers if not known.get(number)]
    failures = []

    def run(number: int) -> tuple[int, str, float]:
        started = time.monotonic()
        return number, run_cell(number), time.monotonic() - started

    with ThreadPoolExecutor(jobs) as threads:
        for number, failure, seconds in threads.map(run, left):
            if results:
                with results.open("a", encoding="utf-8") as file:
                    file.write(f"{number} {'failed' if failure else 'passed'}\n")
            if failure:
                failures.append(failure)
                print(failure, flush=True)
                continue
            print(f"cell {number}: equal, {seconds:.1f} s: {draw(number).describe()}", flush=True)
    return failures


def read_results(path: Path) -> dict[int, bool]:
    """Return whether each cell of a file passed the last time."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {int(number): word == "passed" for number, word in (line.split() for line in lines)}
