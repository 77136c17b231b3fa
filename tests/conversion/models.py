"""Small models in every form that is converted, with random weights, norms included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases import quick
from tests.formats.hf_folders import SCALING, SOFTMAX, config_of
from trainer.engine.formats.hf_folder import list_tensors, open_tensors
from trainer.model_zoo.config import ModelConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "scaled": {"rope_theta": 5e5, "rope_scaling": SCALING, "head_dim": 12},
    "qwen3": {"name": "qwen3", "head_dim": 12},
    "experts": {"name": "qwen3", "moe": {"num_experts": 5, "expert_ffn_dim": 24}},
    "mixtral": {"name": "mixtral", "moe": {"num_experts": 5, "expert_ffn_dim": 24}},
    "mistral": {"name": "mistral", "window": 9, "head_dim": 12},
    "qwen2": {"name": "qwen2", "tie_embeddings": True},
    "olmo2": {"name": "olmo2"},
    "phi3": {"name": "phi3", "window": 9},
    "gemma2": {"name": "gemma2", "window": 9, "head_dim": 12},
    "gemma3": {"name": "gemma3", "window": 9, "full_every": 2, "rope_scaling": {"factor": 4.0}},
    "deepseek_v3": {"name": "deepseek_v3", "q_lora_rank": 12},
    "deepseek_v2": {"name": "deepseek_v3", "moe": SOFTMAX},
    "gpt_oss": {"name": "gpt_oss", "window": 9, "moe": {"num_experts": 3}},
    "llama4": {"name": "llama4", "chunk": 9, "nope_every": 2, "moe": {"num_experts": 3}},
}
ALSO = ("mistral", "qwen2", "olmo2", "phi3", "gemma2", "gemma3")
"""variants that only `make test-all` takes everywhere"""
CASES = quick(VARIANTS, *(VARIANTS.keys() - ALSO))
EOS = "<|end|>"


def transformers_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """Return transformers' model of these sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    settings = AutoConfig.for_model(**config.hf_config())
    model = AutoModelForCausalLM.from_config(settings).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            nn.init.normal_(buffer, 0.0, 0.2)
    return model.to(dtype)


def loaded_by_transformers(folder: Path) -> Any:
    """Return the model that transformers reads, in the folder's dtype."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def write_tokenizer_files(folder: Path, vocab_size: int = 300) -> None:
    """Write a byte-level BPE with a token that ends documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(os.__file__).read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        f'{{"eos_token": "{EOS}", "tokenizer_class": "PreTrainedTokenizerFast", '
        '"model_max_length": 77}'
    )


def hf_folder(
    folder: Path,
    config: ModelConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    tokenizer: bool = True,
) -> Path:
    """Write a folder as transformers does."""
    transformers_model(config or config_of(), dtype).save_pretrained(
        folder, max_shard_size=shard_size
    )
    if tokenizer:
        write_tokenizer_files(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a Hugging Face folder, read by the safetensors library."""
    found = {}
    for name, stored in list_tensors(folder).items():
        with open_tensors(stored.file) as file:
            found[name] = file.get_tensor(name)
    return found


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether names, dtypes, shapes and bits are the same."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
