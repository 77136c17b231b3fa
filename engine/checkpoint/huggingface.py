"""Loads a Hugging Face folder into a model: compared first, then filled in place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..errors import CheckpointError, nearest
from ..lora.names import is_adapter
from ..parallel.materialize import first_element
from .hf_folder import (
    CONFIG,
    MAX_SHOWN,
    StoredTensor,
    list_tensors,
    listed,
    open_tensors,
    read_config,
    shown,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ...model_zoo.layout import Layout

DTYPES = {"F64", "F32", "F16", "BF16"}
COMPUTED = ".rotary_emb.inv_freq"
"""Old versions of transformers saved these; every model computes them."""
ELEMENTS_COMPARED = 2**24


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
    match = _match(stored, parameters, config, settings)
    if not match.problems:
        match.problems = _differing_ends(stored, match.sources, config.layout)
        match.hint = "give it two with model.tie_embeddings = false"
    if match.problems:
        text = listed(f"{folder} does not fit the model:", match.problems)
        raise CheckpointError(text, match.hint)
    if settings is None:
        match.notes.append(f"{folder} has no {CONFIG}: only names and shapes were compared")
    by_file: dict[Path, list[tuple[nn.Parameter, str]]] = {}
    for name, parameter in parameters.items():
        theirs = match.sources[name]
        by_file.setdefault(stored[theirs].file, []).append((parameter, theirs))
    for path, wanted in by_file.items():
        with open_tensors(path) as file, torch.no_grad():
            for parameter, theirs in wanted:
                _fill(parameter, file, theirs)
    return match.notes


@dataclass
class _Match:
    """Our parameter name -> theirs, and what does not fit."""

    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hint: str = ""


def _match(
    stored: Mapping[str, StoredTensor],
    parameters: Mapping[str, nn.Parameter],
    config: ModelConfig,
    settings: Mapping[str, Any] | None,
) -> _Match:
    layout, match = config.layout, _Match()
    if not layout.hf_names:
        match.problems.append(f'model "{config.name}" has no table of Hugging Face names')
        return match
    if settings is not None:
        match.problems, match.hint = _compare_settings(settings, config)
    embed, head = _ends(layout)
    # Without config.json's word, a missing projection is taken for a tied one.
    tied_there = (settings or {}).get("tie_word_embeddings", True)
    for name in parameters:
        theirs = layout.to_hf(name)
        if theirs is None:
            match.problems.append(f'{name}: model "{config.name}" has no Hugging Face name for it')
            continue
        if theirs == head and head not in stored and embed in stored and tied_there:
            match.notes.append(f"{head} is not in the folder: {name} starts as the embedding")
            theirs = embed
        match.sources[name] = theirs
    known = {*match.sources.values(), head}
    unexpected = [n for n in stored if n not in known and not n.endswith(COMPUTED)]
    for name, theirs in match.sources.items():
        if theirs in stored:
            match.problems += _misfits(name, parameters[name], theirs, stored[theirs])
            continue
        near = nearest(theirs, unexpected) if len(match.problems) < MAX_SHOWN else ""
        text = f"{theirs} ({name} here) is not in the folder"
        match.problems.append(f"{text}; {near}" if near else text)
    match.problems += [f"{shown(n)} is in the folder but not in the model" for n in unexpected]
    return match


def _misfits(name: str, parameter: nn.Parameter, theirs: str, there: StoredTensor) -> list[str]:
    problems = []
    if there.shape != tuple(parameter.shape):
        problems.append(
            f"{theirs} is {list(there.shape)} there and {list(parameter.shape)} here ({name})"
        )
    if there.dtype not in DTYPES:
        problems.append(f"{theirs} is stored as {there.dtype}: quantized weights are not read")
    return problems


def _compare_settings(settings: Mapping[str, Any], config: ModelConfig) -> tuple[list[str], str]:
    """Return how config.json differs from a model, and what to set to make them agree."""
    layout = config.layout
    there, here = _flat(settings), _flat(config.hf_config())
    impossible = [
        f"{CONFIG} says {key} = {_text(there[key])}, "
        f'model "{config.name}" does {" or ".join(map(_text, possible))} only'
        for key, possible in layout.hf_possible.items()
        if there.get(key) is not None and there[key] not in possible
    ]
    differing = [
        (ours, here.get(key), there[key])
        for key, ours in layout.hf_keys.items()
        if there.get(key) is not None and there[key] != here.get(key)
    ]
    problems = impossible + [
        f"model.{ours} is {'not set' if own is None else _text(own)}, {CONFIG} says {_text(value)}"
        for ours, own, value in differing
    ]
    if impossible or not differing:
        return problems, ""
    wanted = ", ".join(f"{ours} = {_text(value)}" for ours, _, value in differing)
    return problems, f"set in [model]: {wanted}"


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with its rotary settings under one spelling.

    transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`.
    """
    found = settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = {"rope_theta": settings.get("rope_theta"), **(found if isinstance(found, dict) else {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        # The same as any scaling by 1, and a recipe can say that one.
        rope = {"rope_theta": rope["rope_theta"], "factor": 1.0}
    named = {f"rope_parameters.{key}": value for key, value in rope.items()}
    return {**settings, **named, "rope_parameters.rope_type": kind}


def _text(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _ends(layout: Layout) -> tuple[str, str]:
    """Return Hugging Face's names of the embedding's weight and the projection's."""
    embed = layout.to_hf(f"{layout.embed}.weight")
    head = layout.to_hf(f"{layout.head}.proj.weight")
    return embed or "", head or ""


def _differing_ends(
    stored: Mapping[str, StoredTensor], sources: Mapping[str, str], layout: Layout
) -> list[str]:
    """Compare a projection in the folder with the embedding, if the model has one for both."""
    embed, head = _ends(layout)
    if head in sources.values() or head not in stored:
        return []
    one, other = stored[embed], stored[head]
    problem = f"{head} is in the folder and differs from {embed}; the model has one weight for both"
    if one.shape != other.shape:
        return [problem]
    rows = max(1, ELEMENTS_COMPARED // max(1, one.shape[1]))
    with open_tensors(one.file) as one_file, open_tensors(other.file) as other_file:
        a, b = one_file.get_slice(embed), other_file.get_slice(head)
        for first in range(0, one.shape[0], rows):
            part = slice(first, first + rows)
            if not torch.equal(a[part].double(), b[part].double()):
                return [problem]
    return []


def _fill(parameter: nn.Parameter, file: Any, name: str) -> None:
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
