"""Opens a GGUF file as the source of a conversion, and writes one as the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from ..formats.gguf_file import BLOCK, GgufHeader, GgufTensor, lay_out_gguf, read_header
from ..formats.gguf_names import (
    FAMILIES,
    ORIGINAL,
    ROPE_FACTORS,
    gguf_name,
    is_interleaved,
    read_sizes,
    write_sizes,
)
from ..formats.hf_layout import Interleaved
from ..recipe.schema import Recipe
from .gguf_tokenizer import describe_tokenizer
from .source_weights import SourceWeights, config_or_error, parameter_shapes, require_match
from .targets import Job
from .writing import Extent, create_file, split_into_extents, sync, write_all

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""`general.file_type` of a file whose matrices are of a type"""


@dataclass(frozen=True)
class Q8Packed:
    """A matrix as blocks of Q8_0: of 32 numbers of a row, a scale in fp16 and 32 signed bytes.

    Source: `quantize_row_q8_0_ref` in https://github.com/ggml-org/ggml, src/ggml-quants.c.

    Args:
        source: [N, K], K a multiple of 32.
    """

    source: TensorRows
    dtype: torch.dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, bytes of a row]."""
        rows, columns = self.source.shape
        return rows, columns // BLOCK * (BLOCK + 2)

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, as bytes.

        Raises:
            CheckpointError: a number is too large for a scale in fp16.
        """
        blocks = self.source.read(first, last).float().view(last - first, -1, BLOCK)
        scale = blocks.abs().amax(2, keepdim=True) / 127
        if not bool(scale.half().isfinite().all()):
            largest = f"{float(blocks.abs().max()):.6g}"
            raise CheckpointError(
                f"a number is too large for q8_0: {largest}", "write bf16 or fp32"
            )
        scaled = blocks * torch.where(scale == 0, 0, scale.reciprocal())
        # Halves are rounded away from zero, as C's roundf does.
        codes = (scaled.abs() + 0.5).floor().copysign(scaled).to(torch.int8)
        return torch.cat((scale.half().view(torch.uint8), codes.view(torch.uint8)), 2).flatten(1)


@dataclass(frozen=True)
class Q8Rows:
    """A matrix in Q8_0, multiplied in fp32, which holds the products exactly, when it is read.

    Args:
        packed: bytes [N, K / 32 * 34].
        shape: [N, K].
    """

    packed: TensorRows
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def read(self, first: int, last: int) -> Tensor:
        """Return rows `first` to `last`, exclusive, as fp32."""
        blocks = self.packed.read(first, last).view(last - first, -1, BLOCK + 2)
        scale = blocks[..., :2].contiguous().view(torch.float16).float()
        return (blocks[..., 2:].contiguous().view(torch.int8) * scale).flatten(1)


def round_to_q8(tensors: Mapping[str, TensorRows]) -> dict[str, TensorRows]:
    """Return tensors whose matrices have the values of Q8_0; others and odd widths stay.

    Args:
        tensors: the tensors by our parameter names.
    """
    return {
        name: Q8Rows(Q8Packed(tensor), tensor.shape)
        if len(tensor.shape) == 2 and tensor.shape[1] % BLOCK == 0
        else tensor
        for name, tensor in tensors.items()
    }


def choose_forms(forms: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return dtype and shape in which GGUF stores each tensor: vectors always in fp32."""
    return {
        name: (torch.float32 if len(shape) < 2 else dtype, shape)
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
    sources = {name: gguf_name(name) for name in shapes}
    require_match(file, sources, shapes, found, "the file")
    tensors = _by_our_names(file, header, architecture, config, sources)
    return SourceWeights(file, config, tensors, recipe, None, file.parent)


def _read_config(header: GgufHeader, file: Path, recipe: Recipe | None) -> ModelConfig:
    sizes, stored = read_sizes(header.metadata), header.tensors
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
    sources: Mapping[str, str],
) -> dict[str, TensorRows]:
    tensors = {}
    for name, theirs in sources.items():
        tensor = _open(file, header.tensors[theirs])
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
        payload[gguf_name(name)], forms[gguf_name(name)] = tensor, (kind, shape)
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


def read_gguf(file: Path, job: Job) -> dict[str, TensorRows]:
    """Return the tensors of a file that `write_gguf` wrote, by our names."""
    config = job.opened.config
    architecture = next(name for name, ours in FAMILIES.items() if ours == config.name)
    sources = {name: gguf_name(name) for name in job.forms}
    return _by_our_names(file, read_header(file), architecture, config, sources)
