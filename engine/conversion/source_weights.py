"""What each source format is opened as: a model config, tensors read lazily, a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.choose import choose
from ...model_zoo.config import ModelConfig, SettingsError
from ...model_zoo.layout import DOWN, UP, Part, is_adapter
from ..checkpoint.tensors import DerivedTensor, TensorRows
from ..core.errors import CheckpointError
from ..core.text.display import list_problems
from ..formats.hf_match import Shape, list_mismatches
from ..lora.adapter_weights import merge
from ..parallel.materialize import without_storage

if TYPE_CHECKING:
    from ..recipe.schema import Recipe


@dataclass
class SourceWeights:
    """A source whose names and shapes fit its model; no tensor is read yet.

    Attributes:
        place: path of the source.
        config: config of the model.
        tensors: every parameter of the model by our names, and nothing else.
        recipe: recipe that the model was trained with, or that the user gave.
        settings: content of the source's config.json, if there is one.
        side: folder with the tokenizer's files beside the weights, if there is one.
        notes: sentences that the user should read.
        checks: functions that raise if a file is damaged; they run while tensors are copied.
    """

    place: Path
    config: ModelConfig
    tensors: Mapping[str, TensorRows]
    recipe: Recipe | None = None
    settings: dict[str, Any] | None = None
    side: Path | None = None
    notes: list[str] = field(default_factory=list)
    checks: Sequence[Callable[[], str]] = ()


def config_or_error(make: Callable[[], ModelConfig], place: Path) -> ModelConfig:
    """Return a config, or explain why there can be none.

    Raises:
        CheckpointError: sizes are missing or impossible, all listed.
    """
    try:
        return make()
    except SettingsError as error:
        raise CheckpointError(
            list_problems(f"{place} describes no model that can be built:", error.problems),
            "where the file is right and incomplete, describe the model with --recipe",
        ) from error


def parameter_shapes(
    config: ModelConfig, found: Mapping[str, Shape], place: Path
) -> dict[str, Shape]:
    """Return the shape of each parameter of a model, and of buffers that are there or must be.

    Args:
        config: with its vocabulary settled.
        found: what is there: a file that lies about its sizes shall not fill the memory.

    Raises:
        CheckpointError: a size is larger than all tensors together.
    """
    elements = sum(math.prod(shape) for shape in found.values())
    keys = [key for key in config.layout.hf_keys.values() if not key.startswith("rope_scaling.")]
    problems = [
        f"{key} = {value}, but there are {elements} numbers in all"
        for key in keys
        if isinstance(value := _value(config, key), int) and value > elements
    ]
    blocks = getattr(config, "n_layers", 0)
    start = f"{config.layout.blocks}.0."
    one = config.model_copy(update={"n_layers": 1}).parameter_shapes()
    a_block = sum(name.startswith(start) for name in one)
    if blocks * max(2, a_block) > 2 * len(found):  # where half is missing, names tell more
        problems.append(f"n_layers = {blocks}, but there are {len(found)} tensors in all")
    if problems:
        raise CheckpointError(list_problems(f"{place} does not fit its own sizes:", problems))
    with without_storage():
        model = config.build(choose({}, "cpu", 64))
    saved, to_hf = model.saved_buffers().items(), config.layout.to_hf
    buffers = [(name, each) for name, each in saved if to_hf(name) or name in found]
    return {name: tuple(each.shape) for name, each in [*model.named_parameters(), *buffers]}


def _value(config: ModelConfig, key: str) -> Any:
    """Return what a config, or a table in it, has under a dotted key; None: there is no such."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part, None)
    return found


def require_match(
    place: Path,
    sources: Mapping[str, str],
    shapes: Mapping[str, Shape],
    found: Mapping[str, Shape],
    word: str,
    hint: str = "",
) -> None:
    """Check that a place holds all of a model, and nothing else.

    Raises:
        CheckpointError: everything that does not fit.
    """
    problems = list_mismatches(sources, shapes, found, word)
    if problems:
        raise CheckpointError(list_problems(f"{place} does not fit the model:", problems), hint)


def hf_parts(shapes: Mapping[str, Shape], config: ModelConfig) -> dict[str, list[Part]]:
    """Return the tensors in which Hugging Face stores each of a model's.

    Raises:
        CheckpointError: the table of the model has no name for some, or there is no such model.
    """
    try:
        config.require_hf()
    except ValueError as error:
        sentence = f'no Hugging Face model is what this "{config.name}" is: {error}'
        raise CheckpointError(sentence, "convert it by dcp2torch") from error
    found = {name: config.layout.hf_parts(name, shape) for name, shape in shapes.items()}
    nameless = [
        f'{name}: model "{config.name}" has no Hugging Face name for it'
        for name, parts in found.items()
        if not parts
    ]
    if nameless:
        raise CheckpointError(list_problems("the model cannot be exported:", nameless))
    return found


BLOCK_ROWS = 64
"""Rows are merged by whole blocks: other shapes of a product may round another way"""


@dataclass(frozen=True)
class Merged(DerivedTensor):
    """A weight and the adapter beside it; see `merge`."""

    down: Tensor
    up: Tensor
    scale: float

    def read(self, first: int, last: int) -> Tensor:
        """Return some rows."""
        low = first // BLOCK_ROWS * BLOCK_ROWS
        high = min(-(-last // BLOCK_ROWS) * BLOCK_ROWS, self.shape[0])
        blocks = [
            merge(self.source.read(start, end), self.down, self.up[start:end], self.scale)
            for start in range(low, high, BLOCK_ROWS)
            for end in [min(start + BLOCK_ROWS, high)]
        ]
        return torch.cat(blocks)[first - low : last - low]


def merge_tensors(
    place: Path, tensors: Mapping[str, TensorRows], alpha: float
) -> dict[str, TensorRows]:
    """Return a checkpoint's weights by name, each adapter merged into the weight beside it.

    Args:
        place: the checkpoint.
        tensors: weights and adapters by name.
        alpha: of the adapters; their rank is their own.

    Raises:
        CheckpointError: an adapter does not fit its weight, all such are listed.
    """
    weights = {name: each for name, each in tensors.items() if not is_adapter(name)}
    problems = []
    for name in sorted({name.rpartition(".")[0] for name in tensors if is_adapter(name)}):
        parts = [tensors.get(f"{name}.{leaf}") for leaf in ("weight", DOWN, UP)]
        shapes = [part.shape if part else None for part in parts]
        weight, down, up = parts
        if weight is None or down is None or up is None or not _fits(*shapes):
            problems.append(f"{name}: weight, {DOWN} and {UP} are {shapes}")
            continue
        whole = [part.read(0, part.shape[0]) for part in (down, up)]
        scale = alpha / down.shape[0]
        weights[f"{name}.weight"] = Merged(weight, weight.shape, whole[0], whole[1], scale)
    if problems:
        raise CheckpointError(list_problems(f"{place} has adapters that do not fit:", problems))
    return weights


def _fits(weight: object, down: object, up: object) -> bool:
    match weight, down, up:
        case (int(out), int(width)), (int(rank), int(down_width)), (int(rows), int(up_rank)):
            return width == down_width and rows == out and up_rank == rank > 0
    return False
