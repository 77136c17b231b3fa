"""Opens a GGUF file as the source of a conversion, and writes one as the target."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...model_zoo.config import ModelConfig, validate
from ...model_zoo.layers.rope_scaling import RopeScaling
from ...model_zoo.layers.rotary import frequencies, scale_frequencies
from ...model_zoo.sizes import SettingsError
from ..checkpoint.tensors import DTYPES, FileTensor, TensorRows, TensorSpec
from ..core.errors import CheckpointError
from ..core.registry import models
from ..formats.gguf_blocks import Q8Packed, Q8Rows, StackHalf
from ..formats.gguf_file import BLOCK, GgufHeader, GgufTensor, lay_out_gguf, read_header
from ..formats.gguf_names import (
    ORIGINAL,
    ROPE_FACTORS,
    architecture_of,
    gguf_name,
    gguf_parts,
    is_interleaved,
    read_sizes,
    write_sizes,
)
from ..formats.hf_layout import Interleaved, stack_halves
from ..recipe.schema import Recipe
from .gguf_tokenizer import describe_tokenizer
from .source_weights import SourceWeights, config_or_error, parameter_shapes, require_match
from .targets import Job
from .writing import Extent, create_file, split_into_extents, sync, write_all

ROUTER = ".router.weight"
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type` of a file whose matrices are of a type"""


def round_to_q8(tensors: Mapping[str, TensorRows]) -> dict[str, TensorRows]:
    """Return tensors whose matrices have the values of Q8_0; others and odd widths stay.

    Args:
        tensors: the tensors by our parameter names.
    """
    return {
        name: Q8Rows(Q8Packed(tensor), tensor.shape)
        if is_matrix(name, tensor.shape) and tensor.shape[-1] % BLOCK == 0
        else tensor
        for name, tensor in tensors.items()
    }


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is stored in the type of the file."""
    return len(shape) > 1 and not name.endswith(ROUTER)


def choose_forms(forms: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return dtype and shape in which GGUF stores each tensor: vectors, routers always in fp32."""
    return {
        name: (dtype if is_matrix(name, shape) else torch.float32, shape)
        for name, (dtype, shape) in forms.items()
    }


def open_gguf(file: Path, recipe: Recipe | None) -> SourceWeights:
    """Open a GGUF file with tensors in fp32, fp16, bf16 or Q8_0.

    Args:
        file: the file.
        recipe: a recipe that describes the model; None takes the keys of the file.

    Raises:
        CheckpointError: the file cannot be read or does not fit the model. The message lists every
            mismatch.
    """
    header = read_header(file)
    architecture = str(header.metadata.get("general.architecture"))
    config = config_or_error(partial(_read_config, header, file, recipe), file)
    found = {n: each.shape for n, each in header.tensors.items() if n != ROPE_FACTORS}
    shapes = parameter_shapes(config, found, file)
    parts = {name: gguf_parts(name, shape) for name, shape in shapes.items()}
    sources, wanted = dict[str, str](), dict[str, tuple[int, ...]]()
    for name, each in parts.items():
        for number, (theirs, part) in enumerate(each):
            ours = name if len(each) == 1 else f"{name}[:, {number}]"
            sources[ours], wanted[ours] = theirs, part
    require_match(file, sources, wanted, found, "the file")
    tensors = _by_our_names(file, header, architecture, config, shapes)
    return SourceWeights(file, config, tensors, recipe, None, file.parent)


def _read_config(header: GgufHeader, file: Path, recipe: Recipe | None) -> ModelConfig:
    family = recipe.model.name if recipe else ""
    sizes, stored = read_sizes(header.metadata, family), header.tensors
    sizes["tie_embeddings"] = gguf_name("head.proj.weight") not in stored
    embed = stored.get(gguf_name("embed.weight"))
    sizes["vocab_size"] = embed.shape[0] if embed else 1
    if ROPE_FACTORS in stored:
        original = header.metadata.get(f"{header.metadata['general.architecture']}.{ORIGINAL}")
        factors = _open(file, stored[ROPE_FACTORS]).read(0, stored[ROPE_FACTORS].shape[0])
        sizes["rope_scaling"] = {
            "factor": float(factors.max()),
            **({"original_max_seq_len": original} if original else {}),
        }
    config = validate(models[sizes["name"]], sizes)
    if ROPE_FACTORS in stored:
        expected = _rope_factors(config)
        if expected is None or expected.shape != factors.shape:
            raise SettingsError([f"{ROPE_FACTORS} does not fit the width of a head"])
        if not torch.allclose(expected, factors.float(), rtol=1e-5):
            raise SettingsError([f"{ROPE_FACTORS} are not those of Llama 3.1's scaling"])
    if recipe is None:
        return config
    ours = recipe.model.with_vocab(sizes["vocab_size"])
    there, here = config.hf_config(), ours.hf_config()
    there.pop("router_aux_loss_coef", None)  # of training alone: no file says it
    if different := [key for key in there if there[key] != here.get(key)]:
        said = [f"{key} is {here.get(key)}, the file says {there[key]}" for key in different]
        raise SettingsError(said)
    return ours


def _rope_factors(config: ModelConfig) -> Tensor | None:
    """Return what a model's rotary frequencies are divided by, [K / 2]; None: they are plain."""
    scaling = getattr(config, "rope_scaling", None)
    if not isinstance(scaling, RopeScaling):
        return None
    plain = frequencies(config.rotary_width, config.rope_theta)  # type: ignore[attr-defined]
    return plain / scale_frequencies(plain, **scaling.model_dump())


def _open(file: Path, stored: GgufTensor) -> TensorRows:
    if stored.type == "Q8_0":
        packed = (*stored.shape[:-1], stored.shape[-1] // BLOCK * (BLOCK + 2))
        return Q8Rows(FileTensor(file, stored.offset, torch.uint8, packed), stored.shape)
    return FileTensor(file, stored.offset, DTYPES[stored.type], stored.shape)


def _by_our_names(
    file: Path,
    header: GgufHeader,
    architecture: str,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, TensorRows]:
    tensors = {}
    for name, shape in shapes.items():
        parts = [_open(file, header.tensors[part]) for part, _ in gguf_parts(name, shape)]
        tensor = parts[0] if len(parts) == 1 else stack_halves(parts, shape)
        if is_interleaved(name, architecture):
            width = config.head_width  # type: ignore[attr-defined]
            tensor = Interleaved(tensor, tensor.shape, width)
        tensors[name] = tensor
    return tensors


def write_gguf(job: Job, temporary: Path) -> None:
    """Write a GGUF file with the model's sizes and, where GGUF can say it, its tokenizer.

    Args:
        job: the conversion.
        temporary: path of the file to create.

    Raises:
        CheckpointError: GGUF has no architecture for the model.
    """
    opened, config = job.opened, job.opened.config
    try:
        metadata: dict[str, Any] = write_sizes(config)
    except ValueError as error:
        sentence = f'GGUF is not written for this "{config.name}": {error}'
        raise CheckpointError(sentence, "convert it by dcp2hf") from error
    architecture = metadata["general.architecture"]
    payload: dict[str, TensorRows] = {}
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    names = {dtype: name for name, dtype in DTYPES.items()}
    for name, (dtype, shape) in job.forms.items():
        tensor = opened.tensors[name]
        kind = "Q8_0" if isinstance(tensor, Q8Rows) else names[dtype]
        if kind not in FILE_TYPES:
            raise CheckpointError(f"{name} is {dtype}, which GGUF lacks", "give --dtype fp32")
        if isinstance(tensor, Q8Rows):
            tensor = tensor.packed
        if is_interleaved(name, architecture):
            width = config.head_width  # type: ignore[attr-defined]
            tensor = Interleaved(tensor, tensor.shape, width, inverse=True)
        payload |= _divide(name, shape, tensor)
        forms |= {theirs: (kind, part) for theirs, part in gguf_parts(name, shape)}
    kinds = [kind for kind, shape in forms.values() if len(shape) > 1]
    metadata |= {
        "general.name": job.target.stem,
        "general.quantization_version": 2,
        "general.file_type": FILE_TYPES[max(set(kinds), key=kinds.count)],
        **describe_tokenizer(job.tokenizer, config.vocab, opened.notes),
    }
    factors = _rope_factors(config)
    if factors is not None:
        forms[ROPE_FACTORS] = ("F32", tuple(factors.shape))
    head, places, size = lay_out_gguf(metadata, forms)
    create_file(temporary, size, head)
    work: list[Extent] = []
    for name, tensor in payload.items():
        place = places[name]
        dtype = torch.uint8 if place.type == "Q8_0" else DTYPES[place.type]
        work += split_into_extents(temporary, place.offset, tensor, dtype, name)
    if factors is not None:
        content = factors.numpy().astype("<f4").tobytes()
        work.append(Extent(temporary, places[ROPE_FACTORS].offset, [content]))
    write_all(work, job.advance, opened.checks)
    sync([temporary])


def _divide(name: str, shape: tuple[int, ...], tensor: TensorRows) -> dict[str, TensorRows]:
    """Return the tensors in which GGUF stores one of ours, which may be packed."""
    parts = gguf_parts(name, shape)
    if len(parts) == 1:
        return {parts[0][0]: tensor}
    # A packed row has another number of elements.
    return {
        theirs: StackHalf(tensor, (*part[:-1], tensor.shape[-1]), index)
        for index, (theirs, part) in enumerate(parts)
    }


def read_gguf(file: Path, job: Job) -> dict[str, TensorRows]:
    """Return the tensors of a file that `write_gguf` wrote, by our names."""
    config = job.opened.config
    shapes = {name: shape for name, (_, shape) in job.forms.items()}
    return _by_our_names(file, read_header(file), architecture_of(config), config, shapes)
