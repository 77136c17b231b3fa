"""Tasks of lm-evaluation-harness during a run."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ...model_zoo.language_model import LanguageModel
from ..assemble.assemble import Assembled
from ..core.errors import Problem, RecipeError, nearest
from ..inference.find_harness import import_harness, name_scores
from ..inference.score import TextScorer
from ..train.tables import Harness

NUM_TRIED = 2
"""examples of each task at the start of a run; some metrics need more than one"""


def load_tasks(table: Harness) -> dict[str, Any]:
    """Load the tasks of a run with their data; empty: there are none.

    Raises:
        EnvironmentFault: the harness is not installed, or the data of a task cannot be read.
        RecipeError: a task does not exist or is faulty.
    """
    if not table.tasks:
        return {}
    folder = Path(table.include_path) if table.include_path else None
    harness = import_harness()
    with redirect_stderr(io.StringIO()):  # progress bars
        return harness.load_tasks(table.tasks, folder, table.num_fewshot)  # type: ignore[no-any-return] # a module


@dataclass(frozen=True)
class TrainingTasks:
    """Measures the tasks of a run with the model that is trained, on all ranks together.

    Attributes:
        parts: the parts of the run, with the weights in memory.
        loaded: what `load_tasks` returned.
    """

    parts: Assembled
    loaded: dict[str, Any]

    def __call__(self, check: Callable[[], None], limit: int | None = None) -> dict[str, float]:
        """Return the scores, the same on all ranks; all generators of random numbers stay as is.

        Args:
            check: called before each forward pass; what it raises ends the work.
            limit: the number of examples of each task; 0 is all; None takes the recipe's.
        """
        if not self.loaded:
            return {}
        parts, data, harness = self.parts, self.parts.recipe.data, import_harness()
        model = cast("LanguageModel", parts.model)
        scorer = TextScorer(model, parts.plan, parts.vocabulary, check)
        adapter = harness.HarnessModel(scorer, parts.tokenizer, data.seq_len, data.micro_batch)
        # Texts have many lengths, and each would be compiled for itself.
        is_compiled = parts.recipe.compile.enabled
        eager = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
        limit = parts.evaluate.harness.limit if limit is None else limit
        model.eval()
        try:
            with eager, redirect_stderr(io.StringIO()):  # progress bars
                return name_scores(harness.run_tasks(adapter, self.loaded, limit, bootstraps=0))
        finally:
            model.train()


def open_tasks(parts: Assembled, loaded: dict[str, Any]) -> TrainingTasks:
    """Return what measures tasks, once it has measured a few examples of each.

    What cannot work ends the run at its start.

    Args:
        parts: see `TrainingTasks`.
        loaded: see `TrainingTasks`.

    Raises:
        RecipeError: a task is faulty, or none has the score that `evaluate.metric` names.
    """
    tasks, table = TrainingTasks(parts, loaded), parts.evaluate
    scores = tasks(lambda: None, NUM_TRIED)
    if table.follows_task and table.score_key not in scores:
        hint = nearest(table.score_key, scores) or f"known: {', '.join(scores)}"
        raise RecipeError(
            [Problem(f"no task has the score {table.score_key}", "evaluate.metric", hint=hint)]
        )
    return tasks
