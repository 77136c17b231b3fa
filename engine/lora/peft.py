"""Adapters as Hugging Face's PEFT stores them, so that it loads them beside the base model.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..files import atomic_write, sync_folder
from .names import DOWN, UP, is_adapter

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from ...model_zoo.language_model import LanguageModel
    from ...model_zoo.layout import Layout

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
THEIRS = {DOWN: "lora_A", UP: "lora_B"}
SECTION = "model."


def save_adapter(
    folder: Path, model: LanguageModel, config: ModelConfig, *, base: str = ""
) -> None:
    """Write a model's adapters to a new folder that `peft.PeftModel.from_pretrained` loads.

    All ranks of a sharded model call it; the first one writes. The folder appears only when it is
    complete.

    Args:
        folder: must not exist yet.
        model: with adapters, plain or sharded.
        config: what the model was built from.
        base: name or folder of the base model, for whoever loads the adapter.

    Raises:
        CheckpointError: there are no adapters, or Hugging Face has no names for them.
    """
    import torch.distributed as dist

    from .layer import AdaptedLinear

    adapters = {}
    for name, value in model.named_parameters():
        if is_adapter(name):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            adapters[name] = whole.detach().cpu()
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    alphas = [each.alpha for each in model.modules() if isinstance(each, AdaptedLinear)]
    names = [name for name, _ in model.named_parameters()]
    _write(folder, adapters, names, config.layout, max(alphas, default=0.0), base)


def export_adapter(checkpoint: Path, folder: Path, *, base: str | None = None) -> int:
    """Write the adapters of a checkpoint to a new folder that PEFT loads; reads nothing else of it.

    Returns:
        how many tensors there are.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest intact checkpoint is taken.
        folder: must not exist yet.
        base: name or folder of the base model; default: the run's `run.init_from`.

    Raises:
        CheckpointError: the checkpoint is damaged or has no adapters.
    """
    from ..checkpoint.find import find_checkpoint
    from ..checkpoint.guarded import read_tensors
    from ..models import models
    from ..recipe.tables import LoRA

    found = find_checkpoint(checkpoint)
    saved, recipe = found.manifest.tensors, found.manifest.recipe
    state = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in saved.items()
        if name.startswith(SECTION) and is_adapter(name)
    }
    if not state:
        raise CheckpointError(f"{found.path} has no adapters", "it was trained without [lora]")
    read_tensors(found.path, found.manifest, state)
    _write(
        folder,
        {name.removeprefix(SECTION): value for name, value in state.items()},
        [name.removeprefix(SECTION) for name in saved if name.startswith(SECTION)],
        models[recipe["model"]["name"]].layout,
        LoRA.model_validate(recipe["lora"]).alpha,
        recipe["run"]["init_from"] if base is None else base,
    )
    return len(state)


def _write(
    folder: Path,
    adapters: Mapping[str, Tensor],
    names: Collection[str],
    layout: Layout,
    alpha: float,
    base: str,
) -> None:
    """Write a PEFT folder, complete or not at all; `names` are those of all parameters."""
    from safetensors.torch import save_file

    if not adapters:
        raise CheckpointError("the model has no adapters", "set lora.rank")
    if folder.exists():
        raise CheckpointError(f"{folder} exists", "give a new folder, or remove it")
    tensors, modules = {}, set()
    for name, value in adapters.items():
        path, _, leaf = name.rpartition(".")
        theirs = layout.to_hf(f"{path}.weight")
        if theirs is None:
            raise CheckpointError(f"Hugging Face has no name for {path}.weight")
        modules.add(theirs.removesuffix(".weight"))
        stem = f"base_model.model.{theirs.removesuffix('.weight')}"
        tensors[f"{stem}.{THEIRS[leaf]}.weight"] = value.contiguous()
    every = {layout.to_hf(name) for name in names} - {None}
    rank = next(len(value) for name, value in adapters.items() if name.endswith(DOWN))
    settings = _settings(rank, alpha, _targets(modules, every), base)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        save_file(tensors, temporary / WEIGHTS, {"format": "pt"})
        with open(temporary / WEIGHTS, "rb") as file:
            os.fsync(file.fileno())
        atomic_write(temporary / CONFIG, json.dumps(settings, indent=2, sort_keys=True) + "\n")
        temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder.parent)


def _targets(modules: set[str], weights: Collection[str | None]) -> list[str]:
    """Return what PEFT shall match: `q_proj` if every layer's has an adapter, else whole paths."""
    targets = set()
    for module in modules:
        short = module.rpartition(".")[2]
        alike = {str(name).removesuffix(".weight") for name in weights}
        alike = {name for name in alike if name.endswith(f".{short}")}
        targets.add(short if alike <= modules else module)
    return sorted(targets)


def _settings(rank: int, alpha: float, targets: list[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
    }
