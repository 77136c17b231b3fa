"""Reads an adapter that PEFT wrote into a model's own: compared first, then filled in place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...model_zoo.layers.adapter_names import DOWN, UP, is_adapter
from ..checkpoint.tensors import InMemoryTensor
from ..core.errors import CheckpointError
from ..core.text.listed import listed, shown
from ..formats.hf_folder import MAX_CONFIG_BYTES, open_tensors, read_json
from ..formats.hf_load import fill_parameter

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from .tables import LoRA

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
THEIRS = {DOWN: "lora_A", UP: "lora_B"}


PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
}
"""What adapter_config.json may say: anything else is computed in another way than ours."""


def load_adapter(folder: Path, model: LanguageModel, config: ModelConfig, table: LoRA) -> str:
    """Fill a model's adapters from a PEFT folder; return what a user should know.

    Each rank of a sharded model reads its own part, without communication.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        model: with adapters, in memory.
        config: what the model was built from.
        table: what its adapters were made from.

    Raises:
        CheckpointError: the folder cannot be read or is of other adapters, all misfits listed, and
            no tensor was touched.
    """
    problems = _compare_settings(read_json(folder / CONFIG, MAX_CONFIG_BYTES), table)
    adapters = {name: value for name, value in model.named_parameters() if is_adapter(name)}
    names = {name: _their_name(name, config) for name in adapters}
    elsewhere = {_their_name(name, config) for name in model.elsewhere if is_adapter(name)}
    with open_tensors(folder / WEIGHTS) as file, torch.no_grad():
        found = set(file.keys())
        for ours, theirs in names.items():
            if theirs not in found:
                problems.append(f"{theirs} ({ours} here) is not in the folder")
                continue
            shape = list(file.get_slice(theirs).get_shape())
            if shape != list(adapters[ours].shape):
                problems.append(f"{theirs} is {shape} there and {list(adapters[ours].shape)} here")
        unexpected = sorted(found - set(names.values()) - elsewhere)
        problems += [f"{shown(name)} is in the folder but not in the model" for name in unexpected]
        if problems:
            raise CheckpointError(listed(f"{folder} does not fit the adapters:", problems))
        for ours, theirs in names.items():
            fill_parameter(adapters[ours], InMemoryTensor(file.get_tensor(theirs)))
    return f"adapters from {folder}"


def _their_name(name: str, config: ModelConfig) -> str:
    path, _, leaf = name.rpartition(".")
    theirs = (config.layout.to_hf(f"{path}.weight") or path).removesuffix(".weight")
    return f"base_model.model.{theirs}.{THEIRS[leaf]}.weight"


def _compare_settings(settings: Mapping[str, Any], table: LoRA) -> list[str]:
    problems = [
        f"{CONFIG} says {key} = {shown(str(settings[key]))}, which is not read"
        for key, possible in PLAIN.items()
        if key in settings and settings[key] not in possible
    ]
    for key, ours, value in (("r", "rank", table.rank), ("lora_alpha", "alpha", table.alpha)):
        if settings.get(key) != value:
            there = shown(str(settings.get(key)))
            problems.append(f"lora.{ours} is {value:g}, {CONFIG} says {key} = {there}")
    return problems
