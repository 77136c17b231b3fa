"""Whether the task fits the model, the loss, the data and the plan."""

from __future__ import annotations

from collections.abc import Iterator

from ....model_zoo.config import ModelConfig
from ...core.errors import RecipeError, nearest
from ...core.text.positions import KeyPath
from ...core.text.tree import Finding
from ...parallel.mesh import DATA_AXES
from ..schema import Recipe

BIDIRECTIONAL_KERNELS = {
    "attention": ("auto", "matmul", "sdpa"),
    "ragged_attention": ("auto", "blocks", "varlen"),
}
"""operation -> the implementations that take `causal=False`"""


def check_task(recipe: Recipe) -> Iterator[Finding]:
    """Yield everything that does not fit the task."""
    task, model, loss = recipe.task, recipe.model, recipe.loss
    wants_language = task.needs_language_model
    if wants_language != (model.default_task == "language_modeling"):
        kind = "a language model" if wants_language else "a model of a plugin"
        yield (
            ("task", "name"),
            f'"{task.name}" needs {kind}, and the model "{model.name}" is none',
            f'"{model.default_task}" is for that model',
        )
    if model.task_head and not model.takes_heads:
        yield (
            ("task", "name"),
            f'the model "{model.name}" has no head for it',
            "take a model whose config is a DecoderConfig",
        )
    yield from _attention(recipe)
    if not task.accepts(loss):
        yield (
            ("loss", "name"),
            f'the task "{task.name}" does not accept "{loss.name}"',
            f"it accepts {', '.join(task.accepted_losses)}",
        )
    else:
        for key, message in loss.mismatches(task.name):
            yield ("loss", key), message, "leave it out"
    if recipe.data.packing not in task.packings:
        yield (
            ("data", "packing"),
            f'the task "{task.name}" does not support "{recipe.data.packing}"',
            f"it supports {', '.join(task.packings)}",
        )
    yield from _frozen(recipe)
    if task.fields:
        yield from _records(recipe)
    for axis, degree in recipe.parallel.degrees.by_axis.items():
        if degree not in (0, 1) and axis not in (*DATA_AXES, *task.axes):
            yield ("parallel", axis), f'the task "{task.name}" does not support this axis', "keep 1"


def _frozen(recipe: Recipe) -> Iterator[Finding]:
    """Yield what is wrong with the model that the task learns from, or its outputs on disk."""
    task, loss = recipe.task, recipe.loss
    if task.needs_frozen and task.frozen_model(loss) == "":
        hint = "name a run, one of its checkpoints, or a Hugging Face folder"
        yield ("task", task.frozen_key), "is missing", hint
    outputs = task.find_outputs(loss)
    if outputs is None:
        return
    if outputs.settings.get("task.top_k") == 0:
        yield (
            ("task", "top_k"),
            "is 0: all tokens of each position are too many for a disk",
            "try 64",
        )
    path = ("task", "precomputed")
    if not getattr(loss, "uses_reference", True):
        yield path, f'the loss "{loss.name}" compares with no reference', "leave it out"
    if getattr(loss, "uses_mismatches", False):
        message = f'"{loss.name}" mismatches neighbouring samples, and each epoch has other ones'
        yield path, message, "leave it out: the reference then computes while training"
    for index, source in enumerate(recipe.data.sources):
        if getattr(source, "streaming", False):
            message = "samples of a stream have no places, by which outputs are found"
            yield ("data", "sources", index, "streaming"), message, "leave it out"


def _records(recipe: Recipe) -> Iterator[Finding]:
    task, data = recipe.task, recipe.data
    for index, source in enumerate(data.sources):
        path: KeyPath = ("data", "sources", index)
        try:
            source.for_fields(task.fields)
        except RecipeError as error:
            (problem,) = error.problems
            yield (*path, "name"), f'the task "{task.name}": {problem.message}', problem.hint
        if getattr(source, "streaming", False):
            yield (*path, "streaming"), "records are encoded before training", "leave it out"
        for field in getattr(source, "fields", {}):
            if field not in task.fields:
                message = f'the task "{task.name}" reads {", ".join(task.fields)}'
                yield (*path, "fields", field), message, nearest(field, task.fields)
    degrees = recipe.parallel.degrees.by_axis
    if data.pad_to and degrees["pipeline"] > 1:
        message = "the stages of a pipeline exchange rows of one length"
        yield ("data", "pad_to"), message, "leave it out"
    if data.pad_to and data.pad_to % (pieces := recipe.parallel.degrees.known.sequence_pieces):
        message = f"{data.pad_to} is no multiple of {pieces}, into which ranks split a row"
        yield ("data", "pad_to"), message, f"{-(-data.pad_to // pieces) * pieces} is one"


def is_bidirectional(recipe: Recipe) -> bool:
    """Return whether positions see later ones."""
    return getattr(recipe.model, "attention", "causal") == "bidirectional"


def _attention(recipe: Recipe) -> Iterator[Finding]:
    """Yield a problem if the task or the kernels have no use for the model's attention."""
    task, direction = recipe.task, getattr(recipe.model, "attention", "causal")
    if task.needs_language_model and direction not in task.attention:
        yield (
            ("model", "attention"),
            f'the task "{task.name}" does not support "{direction}"',
            f"it supports {', '.join(task.attention)}",
        )
    for operation, known in BIDIRECTIONAL_KERNELS.items():
        kernel = getattr(recipe.kernels, operation)
        if is_bidirectional(recipe) and kernel not in known:
            yield (
                ("kernels", operation),
                f'"{kernel}" sees earlier positions alone, and model.attention is bidirectional',
                f"take {' or '.join(known)}",
            )


def reason_for_no_text(model: ModelConfig, is_language_model: bool) -> str:
    """Return why a model does not predict the next token from those before it; empty: it does."""
    if not is_language_model:
        return f'"{model.name}" is no language model'
    if head := getattr(model, "task_head", None):
        return f"the model has a head for {head.kind}"
    is_causal = getattr(model, "attention", "causal") != "bidirectional"
    return "" if is_causal else "the model's attention is bidirectional"
