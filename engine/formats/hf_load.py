"""Loads a Hugging Face folder into a model, after a check that names, shapes and settings fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.matrices import is_adapter
from ..checkpoint.box import contiguous_box
from ..checkpoint.tensors import (
    BLOCK_BYTES,
    TensorRows,
    add_mean_rows,
    row_bytes,
    row_count,
)
from ..core.errors import CheckpointError
from ..core.text.display import list_problems
from ..core.text.selection import NameSelection
from .hf_folder import CONFIG, StoredTensor, list_tensors, read_config
from .hf_match import Shape, compare_tied_weights, match

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def load_huggingface(
    folder: Path,
    model: Model,
    config: ModelConfig,
    *,
    fresh_head: bool = False,
    selection: NameSelection | None = None,
    may_grow: bool = False,
) -> list[str]:
    """Fill a model's weights in place from a Hugging Face folder, cast to the model's dtypes.

    LoRA adapters keep their values. Of a DTensor parameter a rank reads only its own shard, if the
    shard is one contiguous box. There is no communication: each rank checks the folder for itself.

    Args:
        folder: a folder with `model.safetensors`, or an index and the files that it names, and with
            `config.json` if the model has one.
        model: the model, with storage for its parameters.
        config: the config that the model was built from.
        fresh_head: whether the folder may lack the layer of a task's head, which then stays as it
            is.
        selection: the weights that stay as they are, by our names, and tensors of the folder that
            have other names than Hugging Face's.
        may_grow: whether the folder may have fewer tokens: see `add_mean_rows`.

    Returns:
        Sentences that the user should read.

    Raises:
        CheckpointError: the folder cannot be read or holds another model. The message lists every
            mismatch, and no parameter was changed.
    """
    stored = list_tensors(folder)
    settings = read_config(folder)
    parameters: dict[str, Tensor] = {
        name: p for name, p in model.named_parameters() if not is_adapter(name)
    }
    to_hf = config.layout.to_hf
    parameters |= {name: b for name, b in model.saved_buffers().items() if to_hf(name)}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    elsewhere = {
        name: shape
        for name, shape in model.remote_state.items()
        if name in model.remote_parameters or to_hf(name)
    }
    # The folder holds the tensors of all pipeline stages: without the names of the other stages,
    # `match` would report their tensors as unexpected.
    shapes |= elsewhere
    if selection is not None:
        stored, settings = _select(stored, settings, shapes, config, selection)
        shapes = {name: shape for name, shape in shapes.items() if not selection.excludes(name)}
    wanted, theirs, notes = shapes, config, list[str]()
    lacking = _count_missing_rows(stored, shapes, config)
    if lacking and may_grow:
        # Everything is compared with the model as it is before rows are added.
        shapes = remove_rows(shapes, lacking, config)
        theirs = config.model_copy(update={"vocab_size": config.vocab - lacking})
        notes = [describe_added_rows(config.vocab - lacking, config.vocab)]
    found = match(stored, shapes, theirs, settings, fresh_head=fresh_head)
    if not found.problems:
        found.problems = compare_tied_weights(stored, found, theirs)
        found.hint = "give it two with model.tie_embeddings = false"
    if found.problems:
        if lacking and not may_grow:
            found.hint = hint_at_rows(config.vocab - lacking)
        text = list_problems(f"{folder} does not fit the model:", found.problems)
        raise CheckpointError(text, found.hint)
    if settings is None:
        found.notes.append(f"{folder} has no {CONFIG}: only names and shapes were compared")
    rows = found.rows({name: shapes[name] for name in parameters if name in shapes}, stored)
    with torch.no_grad():
        for name, tensor in rows.items():
            if wanted[name] != shapes[name]:
                tensor = add_mean_rows(tensor, wanted[name][0])
            fill_parameter(parameters[name], tensor)
    return found.notes + notes


def remove_rows(shapes: Mapping[str, Shape], count: int, config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of a model's weights where it embeds `count` tokens fewer."""
    names = config.vocabulary_weights
    return {n: (s[0] - count, *s[1:]) if n in names else s for n, s in shapes.items()}


def describe_added_rows(there: int, here: int) -> str:
    """Return a note about tokens that the source of the weights does not have."""
    return f"rows added for tokens {there} to {here - 1}: each is the mean of the rows before them"


def hint_at_rows(there: int) -> str:
    """Return what to do where a source has fewer tokens and the recipe asks for no rows."""
    return f"set model.vocab_size = {there}; with a larger number rows are added for new tokens"


def _count_missing_rows(
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
) -> int:
    """Return how many tokens a folder's vocabulary lacks; 0 also where it holds no embedding."""
    for name in config.vocabulary_weights & shapes.keys():
        for part in config.hf_parts(name, shapes[name], stored):
            if part.name in stored and stored[part.name].shape:
                return max(0, config.vocab - stored[part.name].shape[0])
    return 0


def _select(
    stored: dict[str, StoredTensor],
    settings: dict[str, Any] | None,
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    selection: NameSelection,
) -> tuple[dict[str, StoredTensor], dict[str, Any] | None]:
    """Return the tensors of a folder that are read, by Hugging Face's names, and the settings.

    Raises:
        RecipeError: a pattern of the selection matches nothing.
    """
    selection.require_used(shapes, stored)
    stored = {selection.rename(name): tensor for name, tensor in stored.items()}
    left = set(filter(selection.excludes, [*stored, *shapes]))
    for name in left & shapes.keys():
        left |= {part.name for part in config.hf_parts(name, shapes[name], stored)}
    if settings and left & shapes.keys():
        # Without embedding and head the vocabulary may be another one; shapes are compared anyway.
        settings = {key: value for key, value in settings.items() if key != "vocab_size"}
    return {name: tensor for name, tensor in stored.items() if name not in left}, settings


def fill_parameter(parameter: Tensor, stored: TensorRows) -> None:
    """Copy a stored tensor into a parameter, or this rank's shard of the tensor into a DTensor.

    Args:
        parameter: a plain tensor or a DTensor, filled in place.
        stored: the full tensor, in the layout of the parameter.
    """
    if type(parameter) in (nn.Parameter, Tensor):
        _fill_rows(parameter, stored, 0)
        return
    sharded = cast("DTensor", parameter)
    local, box = sharded.to_local(), contiguous_box(sharded)
    if box is None:
        # Importing it takes half as long as torch itself; only sharded runs pay.
        from torch.distributed.tensor import distribute_tensor

        # The shard is no contiguous box, so the full tensor is read. Every rank reads it from disk:
        # `src_data_rank=None` keeps `distribute_tensor` from communicating.
        full = stored.read(0, row_count(stored.shape)).to(local)
        mesh, placements = sharded.device_mesh, sharded.placements
        local.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None).to_local())
    elif local.numel():
        _fill_rows(local, stored, box.start[0], box.columns)


def _fill_rows(
    target: Tensor,
    stored: TensorRows,
    first: int,
    columns: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> None:
    """Fill a tensor with rows of a stored tensor, a few at a time to bound the memory.

    Args:
        target: the tensor to fill.
        stored: the tensor to read.
        first: index of the stored row that becomes the first row of `target`.
        columns: selects this rank's columns of the rows that were read.
    """
    step = max(1, BLOCK_BYTES // max(1, row_bytes(stored.shape, stored.dtype)))
    for start in range(0, len(target), step):
        part = target[start : start + step]
        part.copy_(columns(stored.read(first + start, first + start + len(part))))
