"""Makes a recipe one that a CPU computes without files, and says what was replaced. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...kernels.registry import kernels as registered_kernels
from ..data.tables import Data
from ..observe.tables import Metrics
from ..optim.tables import optimizers, schedules
from ..parallel.tables import Compile
from ..precision.tables import MX, Float8, Precision
from ..recipe.schema import Recipe
from ..sources.configs import sources
from ..tasks.tables import TaskConfig
from ..tokenizers.configs import BytesTokenizer
from ..train.tables import EMA, Evaluate
from .records import write_records

RECORDS = 512
SGD = {"lr": 0.05, "momentum": 0.9, "clip_norm": 0.0}
"""by which a second step sees that the first one changed all weights alike"""


def adapt(recipe: Recipe, folder: Path, *, as_is: bool) -> tuple[Recipe, list[str]]:
    """Return a recipe for this CPU, and a line for each thing that differs from the given one.

    Args:
        recipe: the validated recipe.
        folder: where files are written.
        as_is: compute in the recipe's own precision instead of float64.
    """
    notes = [f"data.splits: the largest of {len(recipe.data.splits)}"] * bool(recipe.data.splits)
    recipe = recipe.for_largest_split()
    data, is_made = _make_data(recipe.data, recipe.task, folder)
    if is_made:
        notes.append("data: made from a seed, one token a byte; no file of the recipe is read")
    run = recipe.run.model_copy(update={"steps": 2, "epochs": None, "init_from": "", "seed": 0})
    if recipe.run.init_from or recipe.lora.init_from:
        notes.append("weights: random ones; run.init_from and lora.init_from are not read")
    optimizer = optimizers["sgd"].model_validate({**SGD, "name": "sgd"})
    notes.append(
        f"optimizer: SGD without clipping; {recipe.optimizer.name} would hide wrong scales"
    )
    changes: dict[str, Any] = {
        "run": run,
        "data": data,
        "optimizer": optimizer,
        "schedule": schedules["constant"].model_validate({"name": "constant"}),
        "evaluate": Evaluate(interval=0),
        "federation": None,
        "ema": EMA(),
        "metrics": Metrics(),
        "lora": recipe.lora.model_copy(update={"init_from": ""}),
        "task": _without_files(recipe.task, recipe, notes),
        "precision": _adapt_precision(recipe.precision, notes, as_is=as_is),
        "model": _adapt_model(recipe.model, notes),
        **_adapt_compute(recipe, notes),
    }
    if is_made:
        changes["tokenizer"] = BytesTokenizer()
    return recipe.model_copy(update=changes), notes


def in_float64(recipe: Recipe) -> Recipe:
    """Return a recipe that computes in float64."""
    return recipe.model_copy(update={"precision": _float64(recipe.precision)})


def _float64(table: Precision) -> Precision:
    # No recipe can say "fp64": it is for checks alone.
    exact = {"compute": "fp64", "reduce": "fp64", "parameters": "fp32"}
    return table.model_copy(update={**exact, "float8": Float8(), "mx": MX()})


def _adapt_precision(table: Precision, notes: list[str], *, as_is: bool) -> Precision:
    if not as_is:
        for word in table.low_precision:
            notes.append(f"precision.{word}: compared in float64; --as-is compares it as it is")
        return _float64(table)
    changes: dict[str, Any] = {}
    for word, low in table.low_precision.items():
        changes[word] = low.model_copy(update={"emulate": True})
        notes.append(f"precision.{word}: emulated, rounded as the format does")
    if table.compute in ("auto", "fp16"):
        changes["compute"] = "bf16"
        notes.append(f'precision.compute: "{table.compute}" is bf16 here')
    return table.model_copy(update=changes)


def _adapt_compute(recipe: Recipe, notes: list[str]) -> dict[str, Any]:
    """Return the tables of what a CPU computes in another way."""
    words = {
        operation: "auto"
        for operation, word in recipe.kernels.model_dump().items()
        if word == "compiled"
        or (word != "auto" and registered_kernels[operation][word].obstacle("cpu"))
    }
    for operation in words:
        word = getattr(recipe.kernels, operation)
        notes.append(f'kernels.{operation}: the reference takes the place of "{word}"')
    memory: dict[str, Any] = {"optimizer_in_backward": False}
    if recipe.memory.optimizer_in_backward:
        notes.append("memory.optimizer_in_backward: left out, because gradients are compared")
    if recipe.memory.recompute == "budget":
        memory["recompute"] = "full"
        notes.append('memory.recompute: "full" takes the place of "budget", which compiles')
    if recipe.compile.enabled:
        notes.append("compile: left out")
    parallel = recipe.parallel
    if parallel.async_tensor:
        notes.append("parallel.async_tensor: left out; it needs GPUs")
    if parallel.expert_exchange != "all_to_all":
        notes.append('parallel.expert_exchange: "all_to_all" here; the other needs GPUs')
    return {
        "kernels": recipe.kernels.model_copy(update=words),
        "memory": recipe.memory.model_copy(update=memory),
        "compile": Compile(),
        "parallel": parallel.model_copy(
            update={"async_tensor": False, "expert_exchange": "all_to_all"}
        ),
    }


def _adapt_model(model: Any, notes: list[str]) -> Any:
    """Return the model without what depends on how a batch is split, on purpose."""
    experts: Any = getattr(model, "moe", None)
    changes: dict[str, Any] = {}
    if experts and experts.capacity_factor is not None:
        changes["capacity_factor"] = None
        notes.append("model.moe.capacity_factor: left out; what is dropped depends on the plan")
    if experts and experts.force_balanced:
        changes["force_balanced"] = False
        notes.append("model.moe.force_balanced: left out; which experts come depends on the plan")
    if not changes:
        return model
    return model.model_copy(update={"moe": experts.model_copy(update=changes)})


def _without_files(task: TaskConfig, recipe: Recipe, notes: list[str]) -> TaskConfig:
    """Return the task with a frozen model of random weights, if it has one on disk."""
    place = task.frozen_model(recipe.loss)
    if not place and task.find_outputs(recipe.loss) is None:
        return task
    notes.append(f"task.{task.frozen_key}: a model of random weights")
    # A name that no file has: ranks make the model, and read none.
    return task.model_copy(update={task.frozen_key: "random weights", "precomputed": ""})


def _make_data(data: Data, task: TaskConfig, folder: Path) -> tuple[Data, bool]:
    """Return a table of generated data; the given one where a plugin's data set has the samples."""
    cache = {"cache_dir": str(folder / "cache"), "workers": 0}
    if not task.fields and not task.needs_language_model:
        return data.model_copy(update=cache), False
    if task.fields:
        file = write_records(task, folder, RECORDS)
        if file is None:
            return data.model_copy(update=cache), False
        made = sources["jsonl"].model_validate({"name": "jsonl", "path": str(file)})
    else:
        table = {"name": "synthetic", "num_documents": RECORDS, "document_tokens": 20}
        made = sources["synthetic"].model_validate(table)
    update = {"sources": [made], "validation_fraction": 0.0, **cache}
    return data.model_copy(update=update), True
