"""Reads adapters from PEFT's files, and says what PEFT calls ours and how it stores them.

PEFT adapts experts by `target_parameters`, with A [E * rank, in] and B [out, rank * E], in which
the number of the expert runs fastest: `ParamWrapper` in https://github.com/huggingface/peft,
src/peft/tuners/lora/layer.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.heads import is_head_layer
from ...model_zoo.layout import Layout
from ...model_zoo.matrices import (
    DOWN,
    MAGNITUDE,
    UP,
    adapted_weight,
    adapter_names,
    is_adapter,
)
from ..checkpoint.tensors import InMemoryTensor
from ..core.errors import CheckpointError
from ..core.text.display import list_problems, quote_name
from ..formats.hf_folder import MAX_CONFIG_BYTES, open_tensors
from ..formats.hf_json import read_json
from ..formats.hf_layout import rows_from_hf, rows_to_hf
from ..formats.hf_load import fill_parameter
from .tables import LoRA

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
THEIRS = {DOWN: "lora_A.weight", UP: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
}
"""The values that adapter_config.json may have; with others PEFT computes something else."""


def load_adapter(folder: Path, model: Model, config: ModelConfig, table: LoRA) -> str:
    """Fill a model's adapters from a PEFT folder; return a line for the user that names it.

    Each rank of a sharded model reads its own part, without communication.

    Args:
        folder: a folder with adapter_config.json and adapter_model.safetensors.
        model: a model with adapters, whose parameters have memory.
        config: the model's config.
        table: the recipe's `[lora]`.

    Raises:
        CheckpointError: the folder cannot be read, or its adapters differ from the model's. The
            message lists all mismatches, and no tensor has been changed.
    """
    settings = read_json(folder / CONFIG, MAX_CONFIG_BYTES)
    problems = _compare_settings(settings, table)
    # PEFT lists what such layers are called in any model; names that this one lacks do nothing.
    layers = settings.get("modules_to_save") or []
    has_head = config.task_head is not None and config.task_head.layer in layers
    if layers and not has_head:
        problems.append(f"{CONFIG} says modules_to_save = {quote_name(str(layers))}, not read here")

    def is_read(name: str) -> bool:
        return is_adapter(name) or (has_head and is_head_layer(name))

    adapters = {name: value for name, value in model.named_parameters() if is_read(name)}
    # The folder has the adapters of all pipeline stages: those of other ranks are no mismatch.
    remote = set(filter(is_read, model.remote_parameters))
    every = {*adapters, *remote}
    names = {name: name_in_peft(name, config, every) or name for name in adapters}
    elsewhere = {name_in_peft(name, config, every) for name in remote}
    with open_tensors(folder / WEIGHTS) as file, torch.no_grad():
        found = set(file.keys())
        for ours, theirs in names.items():
            if theirs not in found:
                problems.append(f"{theirs} ({ours} here) is not in the folder")
                continue
            shape = list(file.get_slice(theirs).get_shape())
            like = torch.empty(adapters[ours].shape, device="meta")
            wanted = list(to_peft(ours, like, config.layout).shape)
            if shape != wanted:
                problems.append(f"{theirs} is {shape} there and {wanted} here")
        unexpected = sorted(found - set(names.values()) - elsewhere)
        problems += [
            f"{quote_name(name)} is in the folder but not in the model" for name in unexpected
        ]
        if problems:
            raise CheckpointError(list_problems(f"{folder} does not fit the adapters:", problems))
        for ours, theirs in names.items():
            value = from_peft(ours, file.get_tensor(theirs), adapters[ours].shape, config.layout)
            fill_parameter(adapters[ours], InMemoryTensor(value))
    return f"adapters from {folder}"


def name_in_peft(name: str, config: ModelConfig, adapters: Collection[str]) -> str | None:
    """Return PEFT's name of a weight of an adapter or a head; None: Hugging Face has none.

    Args:
        name: our name.
        config: the model's config.
        adapters: our names of all adapters' weights.
    """
    if not is_adapter(name):
        theirs = config.hf_name(name)
        return theirs and PREFIX + theirs
    weight, ours = adapted_weight(name), next(filter(name.endswith, THEIRS))
    module = adapted_in_peft(weight, config)
    if module is None:
        return None
    if not config.layout.is_expert(name):
        return f"{PREFIX}{module}.{THEIRS[ours]}"
    if config.layout.peft_swaps:
        ours = DOWN if ours == UP else UP
    path, _, leaf = module.rpartition(".")
    # PEFT wraps a module once for each parameter, in the order of the class: the first is inside.
    last = adapter_names(weight.replace("gate_up", "down"))[0]
    inner = ".base_layer" if leaf != "down_proj" and last in adapters else ""
    return f"{PREFIX}{path}{inner}.{THEIRS[ours]}"


def adapted_in_peft(weight: str, config: ModelConfig) -> str | None:
    """Return what PEFT adapts for one of our weights: a module, or a parameter of experts."""
    theirs = config.hf_name(weight)
    if theirs is None:
        return None
    renamed = config.layout.hf_modules
    path = [renamed.get(part, part) for part in theirs.removesuffix(".weight").split(".")]
    return ".".join(path)


def to_peft(name: str, value: Tensor, layout: Layout) -> Tensor:
    """Convert a weight of an adapter or a head to the layout of PEFT's files.

    Args:
        name: our name.
        value: the whole tensor.
        layout: names of the model's parts.
    """
    if not (is_adapter(name) and layout.is_expert(name)):
        return value
    is_down = name.endswith(DOWN)
    if not is_down:
        value = rows_to_hf(value, _form(name, layout))
    if layout.peft_swaps:
        value = value.mT
    if is_down != layout.peft_swaps:
        return value.flatten(0, 1)
    return value.permute(1, 2, 0).flatten(1)


def from_peft(name: str, value: Tensor, shape: torch.Size, layout: Layout) -> Tensor:
    """Convert a tensor of PEFT's to our layout: the inverse of `to_peft`.

    Args:
        name: our name.
        value: PEFT's tensor.
        shape: of our parameter.
        layout: names of the model's parts.
    """
    if not (is_adapter(name) and layout.is_expert(name)):
        return value
    is_down = name.endswith(DOWN)
    if is_down != layout.peft_swaps:
        value = value.view(shape[0], -1, value.shape[1])
    else:
        value = value.view(len(value), -1, shape[0]).permute(2, 0, 1)
    if layout.peft_swaps:
        value = value.mT
    return value if is_down else rows_from_hf(value, _form(name, layout))


def _form(name: str, layout: Layout) -> list[str]:
    """Return how Hugging Face joins the rows of a stack, see `Layout.hf_forms`."""
    return [form for form in layout.hf_form(adapted_weight(name)) if form != "transposed"]


def _compare_settings(settings: Mapping[str, Any], table: LoRA) -> list[str]:
    problems = [
        f"{CONFIG} says {key} = {quote_name(str(settings[key]))}, which is not read"
        for key, possible in PLAIN.items()
        if key in settings and settings[key] not in possible
    ]
    for key, ours, value in (("r", "rank", table.rank), ("lora_alpha", "alpha", table.alpha)):
        if settings.get(key) != value:
            there = quote_name(str(settings.get(key)))
            problems.append(f"lora.{ours} is {value:g}, {CONFIG} says {key} = {there}")
    for key, value in (("rslora", table.rslora), ("dora", table.dora)):
        if bool(settings.get(f"use_{key}")) != value:
            here, there = str(value).lower(), str(not value).lower()
            problems.append(f"lora.{key} is {here}, {CONFIG} means {there}")
    return problems
