"""Hugging Face folders of small models, and models to fill from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.engine.core.errors import CheckpointError
from trainer.engine.core.registry import models
from trainer.engine.formats.hf_load import load_huggingface
from trainer.engine.parallel.materialize import materialize, without_storage
from trainer.kernels.choose import choose
from trainer.model_zoo.config import ModelConfig
from trainer.model_zoo.language_model import LanguageModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIZES: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 48,
    "vocab_size": 320,
    "max_seq_len": 256,
}
SCALING = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_seq_len": 32,
}
SOFTMAX = {"score": "softmax", "balance_bias": False, "normalize": False, "num_shared": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_embeddings": True},
    "scaled": {"rope_theta": 5e5, "rope_scaling": SCALING},
    "wide heads": {"head_dim": 12, "n_kv_heads": 1, "norm_eps": 1e-3},
    "qwen3": {"name": "qwen3"},
    "experts": {"name": "qwen3", "moe": {"num_experts": 5, "expert_ffn_dim": 24}},
    "deepseek_v3": {"name": "deepseek_v3", "q_lora_rank": 12},
    "deepseek_v2": {"name": "deepseek_v3", "moe": SOFTMAX},
}


def config_of(name: str = "llama3", **changes: Any) -> ModelConfig:
    sizes = {key: size for key, size in SIZES.items() if key in models[name].model_fields}
    return models[name].model_validate(sizes | changes)


def empty_model(config: ModelConfig) -> LanguageModel:
    """Return a model whose every weight is 7."""
    with without_storage():
        model = config.build(choose({}, "cpu", 64))
    materialize(model, torch.device("cpu"), seed=0, fill=False)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    return model


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Return random weights under Hugging Face's names."""
    generator = torch.Generator().manual_seed(3)
    return {
        part.name: torch.randn(part.shape, generator=generator)
        for name, parameter in empty_model(config).named_parameters()
        for part in config.layout.hf_parts(name, tuple(parameter.shape))
    }


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / SINGLE)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """Write two files and their index."""
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def refusal(folder: Path, config: ModelConfig | None = None) -> CheckpointError:
    """Return the error, after seeing that no weight was touched."""
    config = config or config_of()
    model = empty_model(config)
    with pytest.raises(CheckpointError) as raised:
        load_huggingface(folder, model, config)
    assert all((parameter == 7.0).all() for parameter in model.parameters()), "touched"
    assert str(folder) in raised.value.message
    return raised.value
