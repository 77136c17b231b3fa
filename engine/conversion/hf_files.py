"""The small files of a Hugging Face folder: configuration, generation, tokenizer. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def config_json(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
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


def generation_json(eos_id: int | None) -> dict[str, Any]:
    """Return generation_config.json."""
    return {"_from_model_config": True, **_ends(eos_id)}


def _ends(eos_id: int | None) -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that must not exist yet."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def side_files(folder: Path) -> list[Path]:
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
