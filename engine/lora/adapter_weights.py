"""Merges adapters into the weights beside them (arXiv:2106.09685, 4.1), and reads PEFT's files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.heads import is_head_layer
from ...model_zoo.layers.dense import AdaptedLinear, Linear
from ...model_zoo.layout import DOWN, UP, is_adapter
from ..checkpoint.tensors import InMemoryTensor
from ..core.errors import CheckpointError
from ..core.local import is_split
from ..core.text.display import list_problems, quote_name
from ..formats.hf_folder import MAX_CONFIG_BYTES, open_tensors
from ..formats.hf_json import read_json
from ..formats.hf_load import fill_parameter
from .tables import LoRA

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return weight + scale * up @ down, summed in fp32, in the dtype of the weight.

    Args:
        weight: [out, in], plain or sharded; a sharded one comes back with the same placements.
        down: A, [rank, in].
        up: B, [out, rank].
        scale: alpha / rank.
    """
    if is_split(weight):
        return _merge_pieces(cast("DTensor", weight), down, up, scale)
    # A bf16 sum would round away updates that are small beside the weight.
    product = up.float() @ down.float()
    return (weight.float() + product * scale).to(weight.dtype)


def _merge_pieces(weight: DTensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the merged weight; each rank makes its shard of it from rows of B and columns of A."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    def cut(adapter: Tensor, dim: int) -> Tensor:
        # Gathered whole: an adapter is small, and FSDP may split it along another dim.
        whole = cast("DTensor", adapter).full_tensor() if is_split(adapter) else adapter
        # A shard's `dim` is also that of torch's strided ones, which FSDP makes of pieces.
        places = [p if getattr(p, "dim", None) == dim else Replicate() for p in weight.placements]
        placed = distribute_tensor(whole, weight.device_mesh, places, src_data_rank=None)
        return placed.to_local()

    merged = merge(weight.to_local(), cut(down, 1), cut(up, 0), scale)
    return DTensor.from_local(
        merged,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's weights by name, without gradients, with the adapters merged into them.

    Without adapters these are its parameters. On several ranks of a sharded model all call it, and
    get DTensors. A tied weight appears once.
    """
    adapted = {
        path: module for path, module in model.named_modules() if isinstance(module, AdaptedLinear)
    }
    stored = {name: value.detach() for name, value in model.named_parameters()}
    weights = {}
    for name, value in stored.items():
        path = name.rpartition(".")[0]
        if path not in adapted:
            weights[name] = value
        elif not is_adapter(name):
            down, up = stored[f"{path}.{DOWN}"], stored[f"{path}.{UP}"]
            weights[name] = merge(value, down, up, adapted[path].scale)
    return weights


def merge_adapters(model: nn.Module) -> None:
    """Replace each adapted projection of an unsharded model by a plain one, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            # On meta, because the merged weight replaces the new one at once.
            with torch.device("meta"):
                plain = Linear(module.in_features, module.out_features)
            plain.bias = module.bias
            plain.weight = torch.nn.Parameter(
                merge(module.weight, module.lora_a, module.lora_b, module.scale)
            )
            model.set_submodule(path, plain)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
THEIRS = {DOWN: "lora_A", UP: "lora_B"}


PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
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
    names = {name: name_in_peft(name, config) or name for name in adapters}
    # The folder has the adapters of all pipeline stages: those of other ranks are no mismatch.
    remote = filter(is_read, model.remote_parameters)
    elsewhere = {name_in_peft(name, config) for name in remote}
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
        problems += [
            f"{quote_name(name)} is in the folder but not in the model" for name in unexpected
        ]
        if problems:
            raise CheckpointError(list_problems(f"{folder} does not fit the adapters:", problems))
        for ours, theirs in names.items():
            fill_parameter(adapters[ours], InMemoryTensor(file.get_tensor(theirs)))
    return f"adapters from {folder}"


def name_in_peft(name: str, config: ModelConfig) -> str | None:
    """Return PEFT's name of a weight of an adapter or a head; None: Hugging Face has none."""
    path, _, leaf = name.rpartition(".")
    theirs = config.hf_name(f"{path}.weight" if is_adapter(name) else name)
    if theirs is None or not is_adapter(name):
        return theirs and PREFIX + theirs
    return f"{PREFIX}{theirs.removesuffix('.weight')}.{THEIRS[leaf]}.weight"


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
    return problems
