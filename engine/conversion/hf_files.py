"""The files of a Hugging Face folder: which tensor goes where, index, configuration, tokenizer.

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
    """Divide tensors over files, in their order, each file of at most `shard_bytes` if it can.

    Returns:
        the names of the files, and where each tensor lies in them.
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
    """Return the index of several files by its name; of one file, nothing."""
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
    """Return the dtype that most elements have, as config.json names it."""
    sizes: dict[str, int] = {}
    for dtype, shape in tensors.values():
        sizes[dtype_name(dtype)] = sizes.get(dtype_name(dtype), 0) + math.prod(shape)
    return max(sizes, key=lambda name: sizes[name])


def build_config_json(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """Return config.json, with the rotary settings in the spellings of transformers 4 and 5."""
    settings = config.hf_config()
    rope = settings.get("rope_parameters")
    if isinstance(rope, dict):
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        scaled = scaling.get("rope_type") != "default"
        settings |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling if scaled else None,
        }
    return {**settings, "dtype": dtype, "torch_dtype": dtype, **_ends(eos_id)}


def build_generation_json(eos_id: int | None) -> dict[str, Any]:
    """Return generation_config.json."""
    return {"_from_model_config": True, **_ends(eos_id)}


def _ends(eos_id: int | None) -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that must not exist yet."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def list_side_files(folder: Path) -> list[Path]:
    """Return the tokenizer's and generation's files in a folder, if they have a sane size.

    Links are followed within the folder, and to the blobs of Hugging Face's cache: a folder from
    elsewhere shall not have any other file copied.
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
