"""Reads the tensor list and the config of a Hugging Face folder that is not trusted.

The module opens safetensors and JSON only, so nothing in a folder can run code, and does not import
torch. Formats:
https://huggingface.co/docs/safetensors and, for the index, transformers' `save_pretrained`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..core.files import open_regular, require_regular
from ..core.text.display import list_problems, quote_name
from .hf_json import parse_json, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 16 * 2**20
MAX_INDEX_BYTES = 64 * 2**20
MAX_CONFIG_BYTES = 2**20
TEXT = "language_model."
"""prefix of the language model's tensors in a checkpoint that has a vision tower too"""
MULTIMODAL = {"llama4": "llama4_text", "gemma3": "gemma3_text"}
"""`model_type` of such a checkpoint -> that of its language model"""

OLD_BODY = "transformer."


@dataclass(frozen=True)
class StoredTensor:
    """The position, dtype and shape of a tensor in a safetensors file.

    Attributes:
        file: path of the safetensors file.
        dtype: the dtype as safetensors spells it, such as "BF16".
        shape: the shape of the tensor as it is read.
        offset: position of the first byte of the tensor in the file.
        scales: the scales of a tensor that is packed in blocks, whose dtype is then the one that
            reading returns: "BF16" of MXFP4, "F32" of float8; None for all other tensors.
        block: rows and columns that a scale of a float8 tensor is for.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    scales: StoredTensor | None = None
    block: tuple[int, int] = (0, 0)


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of `model.safetensors`, or else of every file that the index names.

    Every file is opened and its header is checked against its size. The blocks and scales of an
    packed tensor (MXFP4, float8) appear as one tensor. Of a multimodal model only the language
    model is listed.

    Args:
        folder: the Hugging Face folder.

    Returns:
        The tensors by their Hugging Face names.

    Raises:
        CheckpointError: the folder has no weights that can be read, or a file is damaged, missing
            or hostile.
    """
    found = _pair_scales(_unpacked(_list_files(folder)), _block_size(folder))
    words = {name.removeprefix(TEXT): each for name, each in found.items() if name.startswith(TEXT)}
    return {plain_name(name): each for name, each in (words or found).items()}


def plain_name(name: str) -> str:
    """Return a tensor's name with the body under `model`, as most of transformers' classes have it.

    Question answering of some families has it under `transformer`, as older versions had.
    """
    return f"model.{name.removeprefix(OLD_BODY)}" if name.startswith(OLD_BODY) else name


def _unpacked(found: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace each pair of MXFP4 blocks and scales by the BF16 tensor that the pair encodes."""
    tensors = dict(found)
    for name, blocks in found.items():
        whole = name.removesuffix("_blocks")
        scales = found.get(f"{whole}_scales")
        is_packed = whole != name and blocks.dtype == "U8" and blocks.shape[3:] == (16,)
        if is_packed and scales and (scales.dtype, scales.shape) == ("U8", blocks.shape[:3]):
            del tensors[name], tensors[f"{whole}_scales"]
            experts, columns, groups, _ = blocks.shape
            # A scale covers 32 values, and `Mxfp4.read` swaps the last two dimensions.
            shape = (experts, 32 * groups, columns)
            tensors[whole] = replace(blocks, dtype="BF16", shape=shape, scales=scales)
    return tensors


def _pair_scales(found: dict[str, StoredTensor], block: tuple[int, int]) -> dict[str, StoredTensor]:
    """Replace each pair of a float8 matrix and its block scales by the tensor that they encode."""
    tensors = dict(found)
    for name, matrix in found.items():
        scales = found.get(f"{name}_scale_inv")
        if scales is None or matrix.dtype != "F8_E4M3" or scales.dtype != "F32":
            continue
        grid = tuple(-(-size // each) for size, each in zip(matrix.shape, block, strict=False))
        if len(matrix.shape) == 2 and scales.shape == grid:
            del tensors[f"{name}_scale_inv"]
            tensors[name] = replace(matrix, dtype="F32", scales=scales, block=block)
    return tensors


def _block_size(folder: Path) -> tuple[int, int]:
    """Return the block size of float8 weights in config.json; without one, DeepSeek-V3's."""
    path = folder / CONFIG
    settings = read_json(path, MAX_CONFIG_BYTES) if path.is_file() else {}
    return _fp8_block(settings.get("quantization_config")) or (128, 128)


def _fp8_block(quantization: Any) -> tuple[int, int] | None:
    """Return rows and columns of a block of float8 weights; None: they are packed otherwise."""
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        return None
    match quantization.get("weight_block_size"), quantization.get("fmt", "e4m3"):
        case [int(rows), int(columns)], "e4m3" if rows > 0 and columns > 0:
            return rows, columns
    return None


def _list_files(folder: Path) -> dict[str, StoredTensor]:
    regular = _regular_files(folder)
    if SINGLE in regular:
        return _read_header(folder / SINGLE)
    if INDEX not in regular:
        raise _nothing_to_read(folder, regular)
    weight_map = _read_index(folder / INDEX)
    problems = _list_bad_file_names(weight_map, regular)
    if problems:
        raise CheckpointError(list_problems(f"{folder / INDEX} cannot be followed:", problems))
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        header = _read_header(folder / file)
        problems += [f"{quote_name(name)} is in {file} too" for name in header if name in tensors]
        tensors |= header
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            problems.append(f"{quote_name(name)} is not in {file}, as the index says")
    if problems:
        raise CheckpointError(list_problems(f"{folder}: index and files disagree:", problems))
    return tensors


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the language model's settings in `config.json`, or None if the file is missing.

    The quantization table of MXFP4 and of float8 in blocks is left out, because `list_tensors`
    presents such weights as BF16 and F32.

    Raises:
        CheckpointError: `config.json` cannot be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        return None
    settings = read_json(path, MAX_CONFIG_BYTES)
    text = settings.get("text_config")
    if settings.get("model_type") in MULTIMODAL and isinstance(text, dict):
        settings = {"model_type": MULTIMODAL[settings["model_type"]], **text}
    quantization = settings.get("quantization_config")
    is_mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    if is_mxfp4 or _fp8_block(quantization):
        del settings["quantization_config"]
    return settings


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file with safetensors' `safe_open`.

    Raises:
        CheckpointError: the file cannot be opened, or a read inside the block fails.
    """
    from safetensors import SafetensorError, safe_open

    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        why = quote_name(str(error))
        raise CheckpointError(f"{path} cannot be read: {why}", "download it again") from error


def _regular_files(folder: Path) -> set[str]:
    # Links count as what they point to: Hugging Face's cache is made of them.
    try:
        return {entry.name for entry in folder.iterdir() if entry.is_file()}
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error.strerror}",
            f"name a folder with one of our checkpoints, or with {SINGLE} or {INDEX}",
        ) from error


def _nothing_to_read(folder: Path, regular: set[str]) -> CheckpointError:
    pickles = sorted(name for name in regular if name.endswith(PICKLES))
    if pickles:
        return CheckpointError(
            f"{folder} holds pickled weights ({quote_name(pickles[0])}), which can run code: "
            "not read",
            "convert them to safetensors where that is safe: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    others = sorted(name for name in regular if name.endswith(".safetensors"))
    found = f"; there is {quote_name(others[0])}" if others else ""
    return CheckpointError(
        f"{folder} holds neither a checkpoint of ours nor {SINGLE} or {INDEX}{found}",
        "fetch the whole folder of the model",
    )


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(f"{path}: weight_map must give a file name for every tensor")
    return weight_map


def _list_bad_file_names(weight_map: dict[str, str], regular: set[str]) -> list[str]:
    problems = []
    for file in sorted(set(weight_map.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            problems.append(f"{quote_name(file)} is not the plain name of a .safetensors file")
        elif file not in regular:
            problems.append(f"{quote_name(file)} is not in the folder")
    return problems


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, after the checks that safetensors does not make."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    # `safe_open` does not return the offsets of tensors, so the header is parsed here too.
    header = parse_json(text, path)
    with open_tensors(path) as opened:
        entries = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: StoredTensor(
                path,
                entry.get_dtype(),
                tuple(entry.get_shape()),
                8 + length + header[name]["data_offsets"][0],
            )
            for name, entry in entries.items()
        }
