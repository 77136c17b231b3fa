"""Lays out the files of a Hugging Face folder: shards, index, configs, tokenizer files.

Formats: https://huggingface.co/docs/safetensors; index as transformers' `save_pretrained`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.chunks import FileLayout, lay_out_file
from ..checkpoint.tensors import TensorSpec, dtype_name, nbytes
from ..formats.hf_folder import INDEX, SINGLE

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
MAX_SIDE_BYTES = 2**28


def lay_out(tensors: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, FileLayout]:
    """Divide tensors over safetensors files, in the order given.

    Args:
        tensors: the dtype and shape of each tensor by name.
        shard_bytes: largest number of tensor bytes in a file; a larger tensor gets its own file.

    Returns:
        The layout of each file by file name.
    """
    groups: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = nbytes(shape, dtype)
        if groups[-1] and filled + size > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = (dtype, shape)
        filled += size
    count = len(groups)
    if count == 1:
        return {SINGLE: lay_out_file(groups[0])}
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": lay_out_file(group)
        for number, group in enumerate(groups, 1)
    }


def build_index(
    shards: Mapping[str, FileLayout], tensors: Mapping[str, TensorSpec]
) -> dict[str, str]:
    """Return the name and text of the index file, or an empty dict if there is only one shard."""
    if len(shards) == 1:
        return {}
    forms = tensors.values()
    content = {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape in forms),
            "total_size": sum(nbytes(shape, dtype) for dtype, shape in forms),
        },
        "weight_map": {
            name: file for file, layout in shards.items() for name in sorted(layout.offsets)
        },
    }
    return {INDEX: json.dumps(content, indent=2) + "\n"}


def find_main_dtype(tensors: Mapping[str, TensorSpec]) -> str:
    """Return the dtype of most elements, spelled as in config.json, such as "bfloat16"."""
    sizes: dict[str, int] = {}
    for dtype, shape in tensors.values():
        sizes[dtype_name(dtype)] = sizes.get(dtype_name(dtype), 0) + math.prod(shape)
    return max(sizes, key=lambda name: sizes[name])


def build_config_json(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """Return the content of config.json.

    The rotary settings and the dtype are written twice, because transformers 4 and 5 read different
    keys.

    Args:
        config: the model's config.
        dtype: the dtype of the weights, such as "bfloat16".
        eos_id: id of the end-of-document token; None if there is no tokenizer.
    """
    settings = config.hf_config()
    rope = settings.get("rope_parameters")
    if isinstance(rope, dict):
        # Gemma 3 has rotary settings for each kind of block.
        if near := rope.get("sliding_attention"):
            rope = rope["full_attention"]
            settings["rope_local_base_freq"] = near["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaled = scaling.get("rope_type") != "default"
        settings |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling if scaled else None,
        }
    return {**settings, "dtype": dtype, "torch_dtype": dtype, **_ends(eos_id)}


def build_generation_json(eos_id: int | None) -> dict[str, Any]:
    """Return the content of generation_config.json."""
    return {"_from_model_config": True, **_ends(eos_id)}


def _ends(eos_id: int | None) -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that must not exist yet."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def list_side_files(folder: Path) -> list[Path]:
    """Return the paths of the tokenizer files and generation_config.json in a folder.

    A link is followed only within the folder and to the blobs of Hugging Face's cache, so that a
    downloaded folder cannot make conversion copy any other file of this machine. Files larger than
    `MAX_SIDE_BYTES` are left out.
    """
    home = folder.resolve()
    places = (home, home.parent.parent / "blobs")
    return [
        path
        for path in (folder / name for name in (*TOKENIZER_FILES, GENERATION))
        if path.is_file()
        and any(path.resolve().is_relative_to(place) for place in places)
        and path.stat().st_size <= MAX_SIDE_BYTES
    ]
