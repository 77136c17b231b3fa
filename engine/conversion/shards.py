"""Which tensor goes where in safetensors files: known before a byte is written.

Format: https://huggingface.co/docs/safetensors; names and index as transformers' `save_pretrained`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoint.tensors import DTYPES, Form, nbytes
from ..formats.hf_folder import INDEX, SINGLE

CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """One file: its first bytes, and where each tensor begins."""

    file: str
    head: bytes
    offsets: dict[str, int]
    size: int


def lay_out(tensors: Mapping[str, Form], shard_bytes: int) -> list[Shard]:
    """Divide tensors over files, in their order, each file of at most `shard_bytes` if it can."""
    groups: list[dict[str, Form]] = [{}]
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
        return [_shard(SINGLE, groups[0])]
    return [
        _shard(f"model-{number:05d}-of-{count:05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def index_of(shards: list[Shard], tensors: Mapping[str, Form]) -> dict[str, str]:
    """Return the index of several files by its name; of one file, nothing."""
    if len(shards) == 1:
        return {}
    forms = tensors.values()
    content = {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape in forms),
            "total_size": sum(nbytes(shape, dtype) for dtype, shape in forms),
        },
        "weight_map": {name: shard.file for shard in shards for name in sorted(shard.offsets)},
    }
    return {INDEX: json.dumps(content, indent=2) + "\n"}


def main_dtype(tensors: Mapping[str, Form]) -> str:
    """Return the dtype that most elements have, as config.json names it."""
    sizes: dict[str, int] = {}
    for dtype, shape in tensors.values():
        name = str(dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + math.prod(shape)
    return max(sizes, key=lambda name: sizes[name])


def _shard(file: str, tensors: Mapping[str, Form]) -> Shard:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, position = {}, 0
    # Wide elements first, as the library does: then each tensor is aligned.
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        starts[name] = position
        end = position + nbytes(shape, dtype)
        header[name] = {
            "dtype": CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    offsets = {name: len(head) + start for name, start in starts.items()}
    return Shard(file, head, offsets, len(head) + position)
