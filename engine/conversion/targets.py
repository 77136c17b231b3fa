"""Writes the target of a conversion in its format, and reads it back for verification."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash

from ... import __version__
from ...model_zoo.layout import Part
from ..checkpoint.manifest import SaveInfo, read_manifest
from ..checkpoint.tensors import TensorRows, TensorSpec, nbytes, row_bytes
from ..checkpoint.torch_file import (
    encode_descriptor,
    fill_checksums,
    read_file_tensors,
    write_without_data,
)
from ..core.text.display import remove_secrets
from ..formats.hf_folder import CONFIG, MAX_CONFIG_BYTES, list_tensors, plain_name
from ..formats.hf_json import read_json
from ..formats.hf_layout import extract_part, open_parameter, open_stored_tensor
from ..recipe.schema import Recipe
from ..tokenizers.configs import HFTokenizer
from ..tokenizers.tokenizer import Tokenizer
from .hf_files import (
    GENERATION,
    build_config_json,
    build_generation_json,
    build_index,
    find_main_dtype,
    lay_out,
    list_side_files,
    write_json,
)
from .native import read_section, write_native
from .source_weights import SourceWeights, hf_parts
from .writing import Advance, Extent, create_file, split_into_extents, sync, whole_slice, write_all


@dataclass
class Job:
    """One conversion: the opened source, and how its target is written.

    Attributes:
        opened: the source.
        target: final path of the target; the data goes to a temporary path until it is complete.
        forms: dtype and shape in which each tensor is written, by our parameter names.
        recipe: recipe that the manifest of a checkpoint of ours records.
        tokenizer: the model's tokenizer, or None if none is known.
        side: folder whose tokenizer files are copied unchanged; None: the tokenizer saves its own.
        shard_bytes: largest size of a Hugging Face file.
        advance: called with the size of each piece that was written.
    """

    opened: SourceWeights
    target: Path
    forms: Mapping[str, TensorSpec]
    recipe: Recipe
    tokenizer: Tokenizer | None
    side: Path | None
    shard_bytes: int
    advance: Advance

    @cached_property
    def hf_parts(self) -> dict[str, list[Part]]:
        """The Hugging Face tensors of each parameter, by our names."""
        return hf_parts(
            {name: shape for name, (_, shape) in self.forms.items()}, self.opened.config
        )

    @property
    def bytes(self) -> int:
        """The size of all tensors in the target, in bytes."""
        return sum(nbytes(shape, dtype) for dtype, shape in self.forms.values())


def write_checkpoint(job: Job, temporary: Path) -> None:
    """Write one of our checkpoints, with the tokenizer's files beside the weights.

    Args:
        job: the conversion.
        temporary: path of the folder to create.
    """
    temporary.mkdir()
    recipe = remove_secrets(job.recipe.model_dump(mode="json"))
    if job.tokenizer is not None and job.recipe.tokenizer.name != "bytes":
        _tokenizer_files(job, temporary)
        eos_token = getattr(job.tokenizer, "eos_token", None)
        # The recipe must name the tokenizer at its final path, not in the temporary folder.
        own = HFTokenizer(path=str(job.target.absolute()), eos_token=eos_token)
        recipe["tokenizer"] = own.model_dump(mode="json")
    step = re.fullmatch(r"step-(\d{1,18})", job.target.name)
    info = SaveInfo(
        step=int(step[1]) if step else 0,
        recipe=recipe,
        recipe_hash=xxhash.xxh3_128_hexdigest(json.dumps(recipe, sort_keys=True).encode()),
        tokenizer=job.tokenizer.fingerprint if job.tokenizer else "bytes",
        versions={
            "trainer": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        extra={"converted_from": job.opened.place.name},
    )
    tensors = {f"model.{name}": job.opened.tensors[name] for name in job.forms}
    forms = {f"model.{name}": form for name, form in job.forms.items()}
    write_native(temporary, tensors, forms, info, job.advance, job.opened.checks)


def write_huggingface(job: Job, temporary: Path) -> None:
    """Write a Hugging Face folder: weights, index, configs and tokenizer files.

    Args:
        job: the conversion.
        temporary: path of the folder to create.
    """
    opened = job.opened
    generation = _generation(job)
    forms = {
        part.name: (job.forms[name][0], part.stored_shape)
        for name, parts in job.hf_parts.items()
        for part in parts
    }
    shards = lay_out(forms, job.shard_bytes)
    temporary.mkdir()
    todo: list[Extent] = []
    places = {
        theirs: (temporary / file, offset)
        for file, layout in shards.items()
        for theirs, offset in layout.offsets.items()
    }
    for file, layout in shards.items():
        create_file(temporary / file, layout.size, layout.head)
    for ours, parts in job.hf_parts.items():
        for part in parts:
            tensor = extract_part(opened.tensors[ours], part)
            (path, offset), dtype = places[part.name], forms[part.name][0]
            first = part.inside[0] if part.inside else 0
            offset += first * row_bytes(part.shape, dtype)
            todo += split_into_extents(path, offset, tensor, dtype, part.name)
    write_all(todo, job.advance, opened.checks)
    for name, text in build_index(shards, forms).items():
        (temporary / name).write_text(text, encoding="utf-8")
    _tokenizer_files(job, temporary)
    if not (temporary / GENERATION).exists():
        write_json(temporary / GENERATION, generation)
    settings = _settings(job, find_main_dtype(forms), generation)
    write_json(temporary / CONFIG, settings)
    sync(sorted(temporary.iterdir()))


def write_torch(job: Job, temporary: Path) -> None:
    """Write a file in the format of `torch.save`: a dict of tensors by our parameter names.

    Args:
        job: the conversion.
        temporary: path of the file to create.
    """
    todo = [
        # One thread writes the whole tensor, because the CRC-32 after it covers all bytes in order.
        Extent(
            temporary, region.offset, [whole_slice(tensor, region.dtype, name), encode_descriptor]
        )
        for name, region in write_without_data(temporary, job.forms).items()
        if nbytes(region.shape, region.dtype)
        for tensor in [job.opened.tensors[name]]
    ]
    write_all(todo, job.advance, job.opened.checks)
    fill_checksums(temporary)
    sync([temporary])


def read_checkpoint(folder: Path, _: Job) -> dict[str, TensorRows]:
    """Return the weights of one of our checkpoints, by our parameter names."""
    return read_section(folder, read_manifest(folder), "model")


def read_huggingface(folder: Path, job: Job) -> dict[str, TensorRows]:
    """Return the weights of a Hugging Face folder that `write_huggingface` wrote, by our names."""
    regions = {name: open_stored_tensor(each) for name, each in list_tensors(folder).items()}
    plain = {
        ours: [replace(part, name=plain_name(part.name)) for part in parts]
        for ours, parts in job.hf_parts.items()
    }
    return {
        ours: open_parameter(parts, job.forms[ours][1], regions) for ours, parts in plain.items()
    }


def read_torch(file: Path, _: Job) -> dict[str, TensorRows]:
    """Return the tensors of a file that `write_torch` wrote, by our names."""
    found: dict[str, TensorRows] = read_file_tensors(file)
    return found


def _tokenizer_files(job: Job, folder: Path) -> None:
    """Copy the source's tokenizer files, and let the tokenizer write its own if none is copied."""
    for file in list_side_files(job.side) if job.side else []:
        shutil.copyfile(file, folder / file.name)
    if job.tokenizer is not None and not (folder / "tokenizer.json").exists():
        job.tokenizer.save(folder)


def _generation(job: Job) -> dict[str, Any]:
    """Return the content of generation_config.json: the source's if it is copied, else ours."""
    found = (
        [file for file in list_side_files(job.side) if file.name == GENERATION] if job.side else []
    )
    return read_json(found[0], MAX_CONFIG_BYTES) if found else build_generation_json(_eos_id(job))


def _settings(job: Job, dtype: str, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json: the source's if there is one, else ours.

    Args:
        job: the conversion.
        dtype: the dtype of the weights, such as "bfloat16".
        generation: the content of generation_config.json, whose token ids go into our config.json.
    """
    settings = job.opened.settings
    if settings is not None:
        kept = {k: v for k, v in settings.items() if k not in ("dtype", "torch_dtype")}
        return {**kept, "dtype": dtype, "torch_dtype": dtype}
    ids = {
        key: generation[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if generation.get(key) is not None
    }
    return {**build_config_json(job.opened.config, dtype, _eos_id(job)), **ids}


def _eos_id(job: Job) -> int | None:
    return job.tokenizer.eos_id if job.tokenizer else None
