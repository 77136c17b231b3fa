"""Exports LoRA adapters in the format of Hugging Face's PEFT library.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.layers.dense import AdaptedLinear
from ...model_zoo.layout import DOWN, Layout, is_adapter
from ..checkpoint.find import find_checkpoint
from ..checkpoint.ranks import Ranks
from ..checkpoint.tensors import row_count
from ..core.errors import CheckpointError
from ..lora.adapter_weights import CONFIG, THEIRS, WEIGHTS
from ..recipe.changes import load_saved_recipe
from .hf_files import write_json
from .native import read_section
from .source_weights import merge_tensors
from .writing import publish_when_complete, sync


def save_adapter(
    folder: Path,
    model: Model,
    config: ModelConfig,
    *,
    base: str = "",
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Write a model's adapters to a new folder that `peft.PeftModel.from_pretrained` loads.

    All ranks of a sharded model must call it; rank 0 writes. The folder appears under its name only
    when it is complete.

    Args:
        folder: path of the folder, which must not exist yet.
        model: a model with adapters, plain or sharded.
        config: the config that the model was built from.
        base: name or folder of the base model, recorded in adapter_config.json.
        dtype: the dtype of the file; None keeps the dtype of the adapters.
        group: a gloo process group of all ranks; None for a single process.

    Raises:
        RecipeError: the folder exists.
        CheckpointError: there are no adapters, Hugging Face has no names for them, or writing
            failed.
    """
    adapters = {}
    for name, value in model.named_parameters():
        if is_adapter(name):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            adapters[name] = whole.detach().to("cpu", dtype)
    alphas = [each.alpha for each in model.modules() if isinstance(each, AdaptedLinear)]
    if not alphas:
        raise CheckpointError("the model has no adapters", "set lora.rank")
    names = [name for name, _ in model.named_parameters()]
    Ranks(group).reduce(
        lambda: None, lambda _: _write(folder, adapters, names, config.layout, alphas[0], base)
    )


def export_adapter(checkpoint: Path, folder: Path, *, base: str | None = None) -> int:
    """Write the adapters of a checkpoint to a new folder that PEFT loads.

    Only the adapters' bytes are read; of the other tensors only the shapes are checked.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest intact checkpoint is taken.
        folder: path of the folder, which must not exist yet.
        base: name or folder of the base model; None takes the run's `run.init_from`.

    Returns:
        The number of adapter tensors that were written.

    Raises:
        RecipeError: the folder exists.
        CheckpointError: the checkpoint is damaged or has no adapters, or writing failed.
    """
    found = find_checkpoint(checkpoint)
    recipe = load_saved_recipe(found.path, found.manifest)
    saved = read_section(found.path, found.manifest, "model")
    merge_tensors(found.path, saved, recipe.lora.alpha)  # raises if an adapter does not fit
    adapters = {
        name: rows.read(0, row_count(rows.shape))
        for name, rows in saved.items()
        if is_adapter(name)
    }
    if not adapters:
        raise CheckpointError(f"{found.path} has no adapters", "it was trained without [lora]")
    base = recipe.run.init_from if base is None else base
    _write(folder, adapters, saved, recipe.model.layout, recipe.lora.alpha, base)
    return len(adapters)


def _write(
    folder: Path,
    adapters: Mapping[str, Tensor],
    names: Collection[str],
    layout: Layout,
    alpha: float,
    base: str,
) -> None:
    """Write a PEFT folder, which appears only when it is complete.

    Args:
        folder: path of the folder, which must not exist yet.
        adapters: the adapter weights by our names.
        names: the names of all parameters of the model.
        layout: the model's table of Hugging Face names.
        alpha: the numerator of LoRA's scale, alpha / rank.
        base: name or folder of the base model; empty if unknown.
    """
    from safetensors.torch import save_file

    tensors, modules = {}, set()
    for name, value in adapters.items():
        path, _, leaf = name.rpartition(".")
        theirs = layout.to_hf(f"{path}.weight")
        if theirs is None:
            raise CheckpointError(f"Hugging Face has no name for {path}.weight")
        module = theirs.removesuffix(".weight")
        modules.add(module)
        tensors[f"base_model.model.{module}.{THEIRS[leaf]}.weight"] = value.contiguous()
    every = {layout.to_hf(name) for name in names} - {None}
    rank = max(len(value) for name, value in adapters.items() if name.endswith(DOWN))
    settings = _settings(rank, alpha, _targets(modules, every), base)
    with publish_when_complete(
        folder, sum(value.nbytes for value in tensors.values())
    ) as temporary:
        temporary.mkdir()
        save_file(tensors, temporary / WEIGHTS, {"format": "pt"})
        write_json(temporary / CONFIG, settings)
        sync([temporary / WEIGHTS, temporary / CONFIG])


def _targets(modules: set[str], weights: Collection[str | None]) -> list[str]:
    """Return PEFT's `target_modules`.

    A short name such as `q_proj` makes PEFT adapt every module that ends with it, so it is used
    only if all such modules have an adapter; else the full paths are listed.

    Args:
        modules: Hugging Face's paths of the adapted modules.
        weights: Hugging Face's names of all weights of the model.
    """
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
