"""Exports LoRA adapters in the format of Hugging Face's PEFT library.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...model_zoo.base import Model
from ...model_zoo.config import ModelConfig
from ...model_zoo.heads import is_head_layer
from ...model_zoo.matrices import DOWN, adapted_weight, is_adapter
from ..checkpoint.find import find_checkpoint
from ..checkpoint.ranks import Ranks
from ..checkpoint.tensors import row_count
from ..core.errors import CheckpointError
from ..lora.peft_folder import CONFIG, PREFIX, WEIGHTS, adapted_in_peft, name_in_peft, to_peft
from ..lora.tables import LoRA
from ..recipe.changes import load_saved_recipe
from .hf_files import write_json
from .native import read_section
from .source_weights import merge_tensors
from .writing import publish_when_complete, sync

TASK_TYPES = {
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
}
"""PEFT's names of the kinds of heads"""


def save_adapter(
    folder: Path,
    model: Model,
    config: ModelConfig,
    table: LoRA,
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
        table: the recipe's `[lora]`.
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
        if is_adapter(name) or is_head_layer(name):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            adapters[name] = whole.detach().to("cpu", dtype)
    names = [*model.remote_parameters, *(name for name, _ in model.named_parameters())]
    if not any(map(is_adapter, names)):
        raise CheckpointError("the model has no adapters", "set lora.rank")

    def write(parts: list[dict[str, Tensor]]) -> None:
        _write(folder, dict(ChainMap(*parts)), names, config, table, base)

    # Stages of a pipeline hold different adapters; what several ranks hold is sent once.
    ranks = Ranks(group)
    mine = ranks.scatter(lambda: list(adapters), _divide_names)
    ranks.reduce(lambda: {name: adapters[name] for name in mine}, write)


def _divide_names(holders: list[list[str]]) -> list[list[str]]:
    """Return for each rank the names that no rank before it holds."""
    known: set[str] = set()
    divided = []
    for names in holders:
        divided.append([name for name in names if name not in known])
        known.update(names)
    return divided


def export_adapter(checkpoint: Path, folder: Path, *, base: str | None = None) -> int:
    """Write the adapters of a checkpoint to a new folder that PEFT loads.

    Only the adapters' bytes are read; of the other tensors only the shapes are checked.

    Args:
        checkpoint: a checkpoint, or a run directory, whose newest intact checkpoint is taken.
        folder: path of the folder, which must not exist yet.
        base: name or folder of the base model; None takes the run's `run.init_from`.

    Returns:
        The number of tensors that were written.

    Raises:
        RecipeError: the folder exists.
        CheckpointError: the checkpoint is damaged or has no adapters, or writing failed.
    """
    found = find_checkpoint(checkpoint)
    recipe = load_saved_recipe(found.path, found.manifest)
    saved = read_section(found.path, found.manifest, "model")
    merge_tensors(found.path, saved, recipe.lora)  # raises if an adapter does not fit
    adapters = {
        name: rows.read(0, row_count(rows.shape))
        for name, rows in saved.items()
        if is_adapter(name) or is_head_layer(name)
    }
    if not any(map(is_adapter, adapters)):
        raise CheckpointError(f"{found.path} has no adapters", "it was trained without [lora]")
    base = recipe.run.init_from if base is None else base
    _write(folder, adapters, saved, recipe.model, recipe.lora, base)
    return len(adapters)


def _write(
    folder: Path,
    adapters: Mapping[str, Tensor],
    names: Collection[str],
    config: ModelConfig,
    table: LoRA,
    base: str,
) -> None:
    """Write a PEFT folder, which appears only when it is complete.

    Args:
        folder: path of the folder, which must not exist yet.
        adapters: the weights of adapters and of a task's head by our names.
        names: the names of all parameters of the model.
        config: the model's config, with its table of Hugging Face names and its head.
        table: how adapters are scaled.
        base: name or folder of the base model; empty if unknown.
    """
    from safetensors.torch import save_file

    try:
        config.require_hf()
    except ValueError as error:
        raise CheckpointError(
            f"no Hugging Face model is the base of these adapters: {error}"
        ) from error
    tensors, modules, parameters, heads = {}, set[str](), set[str](), set[str]()
    for name, value in adapters.items():
        theirs = name_in_peft(name, config, adapters)
        adapted = adapted_in_peft(adapted_weight(name) if is_adapter(name) else name, config)
        if theirs is None or adapted is None:
            raise CheckpointError(f"Hugging Face has no name for {name}")
        if not is_adapter(name):
            heads.add(theirs.removeprefix(PREFIX).rpartition(".")[0])
        else:
            (parameters if config.layout.is_expert(name) else modules).add(adapted)
        tensors[theirs] = to_peft(name, value, config.layout).contiguous()
    every = {config.hf_name(name) for name in names} - {None}
    rank = max(value.shape[-2] for name, value in adapters.items() if name.endswith(DOWN))
    settings = _settings(rank, table, _targets(modules, every), base)
    if parameters:
        settings["target_parameters"] = sorted(parameters)
    if config.task_head and heads:
        kind = TASK_TYPES[config.task_head.kind]
        settings |= {"task_type": kind, "modules_to_save": sorted(heads)}
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


def _settings(rank: int, table: LoRA, targets: list[str], base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": int(table.alpha) if table.alpha == int(table.alpha) else table.alpha,
        "lora_dropout": table.dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": table.rslora,
        "use_dora": table.dora,
    }
