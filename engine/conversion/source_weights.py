"""Defines `SourceWeights`, which every source format is opened as, and the checks that it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.choose import choose
from ...model_zoo.config import ModelConfig
from ...model_zoo.layout import Part
from ...model_zoo.matrices import adapted_weight, adapter_names, is_adapter, magnitude_name
from ...model_zoo.sizes import SettingsError
from ..checkpoint.tensors import DerivedTensor, TensorRows
from ..core.errors import CheckpointError
from ..core.text.display import list_problems
from ..formats.hf_match import Shape, list_mismatches
from ..lora.adapter_weights import merge
from ..lora.tables import LoRA
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
    """Build a model config from foreign settings.

    Args:
        make: returns the config, or raises `SettingsError`.
        place: the file of the settings, for messages.

    Raises:
        CheckpointError: sizes are missing or impossible. The message lists all of them.
    """
    try:
        return make()
    except SettingsError as error:
        raise CheckpointError(
            list_problems(f"{place} describes no model that can be built:", error.problems),
            "where the file is incomplete, describe the model with --recipe; what no model here "
            "computes needs another library, such as transformers",
        ) from error


def parameter_shapes(
    config: ModelConfig, found: Mapping[str, Shape], place: Path
) -> dict[str, Shape]:
    """Return the shape of each parameter of a model, and of the buffers that the source stores.

    The model is built without storage. Its sizes are compared with the source first, because a
    hostile config with huge sizes could otherwise exhaust the memory.

    Args:
        config: the model's config with the real vocabulary size.
        found: the shape of each tensor in the source.
        place: path of the source, for messages.

    Raises:
        CheckpointError: a size in the config is larger than the number of stored elements.
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
    """Return the value of a dotted key of a config, or None if there is no such key."""
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
    """Check that a source holds every parameter of a model and nothing else.

    Args:
        place: path of the source.
        sources: the stored name of each parameter, by our name.
        shapes: the shape that each parameter must have, by our name.
        found: the shape of each stored tensor, by stored name.
        word: the name of the source in the sentences, such as "the checkpoint".
        hint: the advice of the error.

    Raises:
        CheckpointError: the source does not fit. The message lists every mismatch.
    """
    problems = list_mismatches(sources, shapes, found, word)
    if problems:
        raise CheckpointError(list_problems(f"{place} does not fit the model:", problems), hint)


def hf_parts(shapes: Mapping[str, Shape], config: ModelConfig) -> dict[str, list[Part]]:
    """Return the Hugging Face tensors of each parameter of a model, by our names.

    Args:
        shapes: the shape of each parameter, by our names.
        config: the model's config.

    Raises:
        CheckpointError: no Hugging Face model equals this one, or a parameter has no name there.
    """
    try:
        config.require_hf()
    except ValueError as error:
        sentence = f'no Hugging Face model is what this "{config.name}" is: {error}'
        raise CheckpointError(sentence, "convert it by dcp2torch") from error
    found = {name: config.hf_parts(name, shape) for name, shape in shapes.items()}
    nameless = [
        f'{name}: model "{config.name}" has no Hugging Face name for it'
        for name, parts in found.items()
        if not parts
    ]
    if nameless:
        raise CheckpointError(list_problems("the model cannot be exported:", nameless))
    return {
        name: [_in_body(part, config.hf_body) for part in parts] for name, parts in found.items()
    }


def _in_body(part: Part, body: str) -> Part:
    """Return a part whose tensor is named as in a model with its layers under `body`."""
    is_inside = part.name.startswith("model.")
    return replace(part, name=f"{body}.{part.name.removeprefix('model.')}") if is_inside else part


BLOCK_ROWS = 64
"""adapters are merged in blocks of this many rows: matmuls of other shapes may round differently"""


@dataclass(frozen=True)
class Merged(DerivedTensor):
    """A weight with its LoRA adapter merged in when it is read; see `merge`.

    Args:
        source: the base weight, [out, in], or a stack of experts, [E, ..., in].
        shape: its shape.
        down: the adapter's first matrix, [rank, in] or [E, rank, in].
        up: the adapter's second matrix, [out, rank] or [E, ..., rank].
        scale: the factor of the adapter.
        magnitude: [out], the norms that DoRA gives the rows; None: it is no DoRA.
    """

    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None = None

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, of the merged weight."""
        is_stack = self.down.ndim > 2
        step = 1 if is_stack else BLOCK_ROWS  # a row of a stack is an expert
        low = first // step * step
        high = min(-(-last // step) * step, self.shape[0])
        blocks = []
        for start in range(low, high, step):
            end = min(start + step, high)
            down = self.down[start:end] if is_stack else self.down
            weight = self.source.read(start, end)
            norms = None if self.magnitude is None else self.magnitude[start:end]
            blocks.append(merge(weight, down, self.up[start:end], self.scale, norms))
        return torch.cat(blocks)[first - low : last - low]


def merge_tensors(
    place: Path, tensors: Mapping[str, TensorRows], table: LoRA
) -> dict[str, TensorRows]:
    """Merge each LoRA adapter of a checkpoint into its base weight, lazily.

    Args:
        place: path of the checkpoint, for messages.
        tensors: weights and adapters by name.
        table: says how adapters are scaled; the rank is read from the adapter's shape.

    Returns:
        The weights by name, without the adapters.

    Raises:
        CheckpointError: adapters do not fit their weights. The message lists all of them.
    """
    weights = {name: each for name, each in tensors.items() if not is_adapter(name)}
    problems = []
    for name in sorted({adapted_weight(name) for name in tensors if is_adapter(name)}):
        down_name, up_name = adapter_names(name)
        parts = [tensors.get(part) for part in (name, down_name, up_name)]
        shapes = [part.shape if part else None for part in parts]
        weight, down, up = parts
        if weight is None or down is None or up is None or not _fits(*shapes):
            problems.append(f"{name}, {down_name} and {up_name} are {shapes}")
            continue
        magnitude = tensors.get(magnitude_name(name))
        norms = magnitude.shape if magnitude else None
        if norms != (weight.shape[:1] if table.dora else None):
            problems.append(f"lora.dora is {str(table.dora).lower()}, and {name} has norms {norms}")
            continue
        whole = [part.read(0, part.shape[0]) for part in (down, up)]
        learned = magnitude.read(0, weight.shape[0]) if magnitude else None
        scale = table.scale(down.shape[-2])
        weights[name] = Merged(weight, weight.shape, whole[0], whole[1], scale, learned)
    if problems:
        raise CheckpointError(list_problems(f"{place} has adapters that do not fit:", problems))
    return weights


def _fits(weight: Shape | None, down: Shape | None, up: Shape | None) -> bool:
    if weight is None or down is None or up is None or min(len(weight), len(down)) < 2:
        return False
    experts = weight[: len(weight) > 2]
    rank = down[-2]
    return down == (*experts, rank, weight[-1]) and up == (*weight[:-1], rank) and rank > 0
