"""Loads a Hugging Face folder into a model: compared first, then filled in place."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..errors import CheckpointError
from ..lora.names import is_adapter
from ..parallel.materialize import first_element
from .hf_folder import CONFIG, list_tensors, listed, open_tensors, read_config
from .hf_match import differing_ends, match

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel


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
        CheckpointError: the folder cannot be read or is of another model, all misfits listed, and
            no tensor was touched.
    """
    stored = list_tensors(folder)
    settings = read_config(folder)
    parameters = {name: p for name, p in model.named_parameters() if not is_adapter(name)}
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found = match(stored, {**shapes, **model.elsewhere}, config, settings)
    if not found.problems:
        found.problems = differing_ends(stored, found.sources, config.layout)
        found.hint = "give it two with model.tie_embeddings = false"
    if found.problems:
        text = listed(f"{folder} does not fit the model:", found.problems)
        raise CheckpointError(text, found.hint)
    if settings is None:
        found.notes.append(f"{folder} has no {CONFIG}: only names and shapes were compared")
    by_file: dict[Path, list[tuple[nn.Parameter, str]]] = {}
    for name, parameter in parameters.items():
        theirs = found.sources[name]
        by_file.setdefault(stored[theirs].file, []).append((parameter, theirs))
    for path, wanted in by_file.items():
        with open_tensors(path) as file, torch.no_grad():
            for parameter, theirs in wanted:
                fill_parameter(parameter, file, theirs)
    return found.notes


def fill_parameter(parameter: nn.Parameter, file: Any, name: str) -> None:
    """Fill a parameter, or this rank's part of a sharded one, from an open file's tensor."""
    if type(parameter) is nn.Parameter:
        parameter.copy_(file.get_tensor(name))
        return
    sharded = cast("DTensor", parameter)
    local, start = sharded.to_local(), first_element(sharded)
    if start is not None:
        if local.numel():
            first = start // parameter.shape[1:].numel()
            local.copy_(file.get_slice(name)[first : first + len(local)])
        return
    # Importing it takes half as long as torch itself; only sharded runs pay.
    from torch.distributed.tensor import distribute_tensor

    full = file.get_tensor(name).to(local)
    mesh, placements = sharded.device_mesh, sharded.placements
    local.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None).to_local())
