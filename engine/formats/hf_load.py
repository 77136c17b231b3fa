"""Loads a Hugging Face folder into a model: compared first, then filled in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...model_zoo.config import ModelConfig
from ...model_zoo.language_model import LanguageModel
from ...model_zoo.layout import is_adapter
from ..checkpoint.box import contiguous_box
from ..checkpoint.tensors import BLOCK_BYTES, TensorRows, row_bytes, row_count
from ..core.errors import CheckpointError
from ..core.text.display import list_problems
from .hf_folder import CONFIG, list_tensors, read_config
from .hf_match import compare_tied_weights, match

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def load_huggingface(folder: Path, model: LanguageModel, config: ModelConfig) -> list[str]:
    """Fill a model's weights from safetensors, cast to its dtypes; return what a user should know.

    Adapters beside them are left alone.
    Of a sharded parameter (DTensor) only this rank's part is read. There is no communication: each
    rank checks the folder for itself.

    Args:
        folder: `model.safetensors`, or an index and its files; `config.json` if there is one.
        model: parameters in memory.
        config: what the model was built from.

    Raises:
        CheckpointError: the folder cannot be read or is of another model. Every mismatch is listed,
            and no tensor was touched.
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
    found = match(stored, shapes | elsewhere, config, settings)
    if not found.problems:
        found.problems = compare_tied_weights(stored, found, config.layout)
        found.hint = "give it two with model.tie_embeddings = false"
    if found.problems:
        text = list_problems(f"{folder} does not fit the model:", found.problems)
        raise CheckpointError(text, found.hint)
    if settings is None:
        found.notes.append(f"{folder} has no {CONFIG}: only names and shapes were compared")
    rows = found.rows({name: shapes[name] for name in parameters}, stored)
    with torch.no_grad():
        for name, parameter in parameters.items():
            fill_parameter(parameter, rows[name])
    return found.notes


def fill_parameter(parameter: Tensor, stored: TensorRows) -> None:
    """Fill a parameter, or this rank's part of a sharded one, from a stored tensor."""
    if type(parameter) in (nn.Parameter, Tensor):
        _fill_rows(parameter, stored, 0)
        return
    sharded = cast("DTensor", parameter)
    local, box = sharded.to_local(), contiguous_box(sharded)
    if box is None:
        # Importing it takes half as long as torch itself; only sharded runs pay.
        from torch.distributed.tensor import distribute_tensor

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
    """Fill a tensor with the rows of a stored one from `first` on, a few at a time.

    Args:
        columns: returns what is wanted of some rows.
    """
    step = max(1, BLOCK_BYTES // max(1, row_bytes(stored.shape, stored.dtype)))
    for start in range(0, len(target), step):
        part = target[start : start + step]
        part.copy_(columns(stored.read(first + start, first + start + len(part))))
