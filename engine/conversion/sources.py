"""Opens the source of a conversion: a Hugging Face folder, our checkpoint, or a state dict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...model_zoo.config import ModelConfig
from ...model_zoo.matrices import is_adapter
from ..checkpoint.find import candidates
from ..checkpoint.manifest import (
    DATA_SUFFIXES,
    Manifest,
    check_hashes,
    check_listing,
    read_manifest,
)
from ..checkpoint.tensors import DTYPES, FileTensor, TensorRows
from ..checkpoint.torch_file import check_records, read_file_tensors
from ..core.errors import CheckpointError
from ..core.registry import models
from ..core.text.display import list_problems, quote_name
from ..formats.hf_folder import CONFIG, StoredTensor, list_tensors, read_config
from ..formats.hf_match import Match, Shape, compare_tied_weights, match
from ..lora.tables import LoRA
from ..recipe.changes import load_saved_recipe
from ..recipe.schema import Recipe
from .native import read_section
from .source_weights import (
    SourceWeights,
    config_or_error,
    merge_tensors,
    parameter_shapes,
    require_match,
)

# Prefixes that DistributedDataParallel and torch.compile put before parameter names.
WRAPPERS = ("module.", "_orig_mod.")
# Keys under which training scripts usually store the state dict.
INNER = ("model", "state_dict", "model_state_dict", "module")


def open_huggingface(folder: Path, recipe: Recipe | None) -> SourceWeights:
    """Open a Hugging Face folder.

    Args:
        folder: the folder.
        recipe: a recipe that describes the model; None takes the sizes in config.json.

    Raises:
        CheckpointError: the folder cannot be read or does not fit the model. The message lists
            every mismatch.
    """
    stored, settings = list_tensors(folder), read_config(folder)
    found = {name: tensor.shape for name, tensor in stored.items()}
    if recipe is not None:
        rows = rows_of(found, recipe.model.layout.to_hf(f"{recipe.model.layout.embed}.weight"))
        config = recipe.model.with_vocab(rows)
    elif settings is not None:
        config = _config_of(settings, found, folder)
    else:
        raise CheckpointError(f"{folder} has no {CONFIG}", "describe the model with --recipe")
    shapes = parameter_shapes(config, found, folder)
    fit = _match_folder(folder, "the folder", stored, shapes, config, settings)
    tensors = fit.rows(shapes, stored)
    return SourceWeights(folder, config, tensors, recipe, settings, folder, fit.notes)


def _config_of(settings: Mapping[str, Any], found: Collection[str], folder: Path) -> ModelConfig:
    """Return the config that config.json describes.

    Args:
        settings: the content of config.json.
        found: names of the stored tensors.
        folder: the folder of config.json, for messages.

    Raises:
        CheckpointError: no model of ours is what it describes.
    """
    family, place = family_of(settings, folder), folder / CONFIG
    config = config_or_error(partial(family.from_hf_config, settings), place)
    # What transformers saves says that there are predictions of further tokens, and holds none.
    without = family.from_hf_config({**settings, "num_nextn_predict_layers": 0})
    further = without.hf_further_blocks(settings)
    names = (f"model.{name.removeprefix('model.')}" for name in found)
    return config if any(name.startswith(further) for name in names) else without


def _match_folder(
    place: Path,
    word: str,
    stored: Mapping[str, StoredTensor],
    shapes: Mapping[str, Shape],
    config: ModelConfig,
    settings: Mapping[str, Any] | None,
) -> Match:
    """Compare tensors that have Hugging Face's names with a model.

    Raises:
        CheckpointError: the tensors do not fit the model. The message lists every mismatch.
    """
    fit = match(stored, shapes, config, settings, word)
    if not fit.problems:
        fit.problems = compare_tied_weights(stored, fit, config)
        fit.hint = "describe it with --recipe, and model.tie_embeddings = false"
    if fit.problems:
        raise CheckpointError(
            list_problems(f"{place} does not fit the model:", fit.problems), fit.hint
        )
    return fit


def open_native(path: Path, recipe: Recipe | None, section: str = "model") -> SourceWeights:
    """Open one of our checkpoints, or the newest complete one of a run directory.

    The hashes of the files are compared later, while tensors are copied.

    Args:
        path: a checkpoint or a run directory.
        recipe: a recipe that describes the model; None takes the recipe in the checkpoint.
        section: "model", or "ema" for the averaged weights.

    Raises:
        CheckpointError: there is no complete checkpoint, or it does not fit the recipe.
    """
    folder, manifest = _newest(path)
    saved = load_saved_recipe(folder, manifest) if recipe is None else recipe
    tensors = read_section(folder, manifest, section)
    if tensors and section != "model":  # weights that were frozen have no average
        tensors = read_section(folder, manifest, "model") | tensors
    if not tensors:
        sections = sorted({name.partition(".")[0] for name in manifest.tensors})
        raise CheckpointError(
            f'{folder} holds no weights of the section "{section}"',
            f"it holds: {', '.join(sections)}",
        )
    if any(map(is_adapter, tensors)):  # the base weights are frozen and have no average
        tensors = read_section(folder, manifest, "model") | tensors
        table = LoRA.model_validate(manifest.recipe.get("lora", {}))
        tensors = merge_tensors(folder, tensors, table)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    config = saved.model.with_vocab(rows_of(found, f"{saved.model.layout.embed}.weight"))
    shapes = parameter_shapes(config, found, folder)
    require_match(folder, {name: name for name in shapes}, shapes, found, "the checkpoint")
    ordered = {name: tensors[name] for name in shapes}
    checks = [
        partial(_check_file, folder, manifest, name)
        for name in manifest.files
        if name.endswith(DATA_SUFFIXES)
    ]
    return SourceWeights(folder, config, ordered, saved, None, folder, [], checks)


def open_torch(file: Path, recipe: Recipe | None) -> SourceWeights:
    """Open a state dict that `torch.save` wrote, with our parameter names or Hugging Face's.

    Args:
        file: the file of `torch.save`.
        recipe: a recipe that describes the model; None takes config.json beside the file.

    Raises:
        CheckpointError: the file cannot be read or does not fit the model. The message lists every
            mismatch.
    """
    notes: list[str] = []
    tensors = read_state_dict(file, notes)
    config, settings = (recipe.model, None) if recipe else _config_beside(file, tensors)
    embed = f"{config.layout.embed}.weight"
    their_embed = config.layout.to_hf(embed)
    if not {embed, their_embed} & tensors.keys():  # a model within one of the user's own
        tensors = _without("model.", tensors)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    is_ours = their_embed not in found
    if recipe:
        config = config.with_vocab(rows_of(found, embed if is_ours else their_embed))
    shapes = parameter_shapes(config, found, file)
    if is_ours:
        require_match(file, {name: name for name in shapes}, shapes, found, "the file")
        rows: dict[str, TensorRows] = {name: tensors[name] for name in shapes}
    else:
        names = {dtype: name for name, dtype in DTYPES.items()}
        stored = {
            name: StoredTensor(
                file, names.get(each.dtype, str(each.dtype)), each.shape, each.offset
            )
            for name, each in tensors.items()
        }
        fit = _match_folder(file, "the file", stored, shapes, config, settings)
        rows = fit.rows(shapes, stored)
        notes += fit.notes
    checks = [partial(check_records, file)]
    return SourceWeights(file, config, rows, recipe, settings, file.parent, notes, checks)


def read_state_dict(file: Path, notes: list[str]) -> dict[str, FileTensor]:
    """Return the tensors of a state dict by name, without the prefixes of `WRAPPERS`.

    Args:
        file: the file of `torch.save`.
        notes: sentences for the user; one is added if only a part of the file is taken.

    Raises:
        CheckpointError: the file does not exist, cannot be read, or holds no tensors.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file", "name the file that torch.save wrote")
    content = read_file_tensors(file)
    if isinstance(content, Mapping):
        inner = next((key for key in INNER if isinstance(content.get(key), Mapping)), None)
        if inner is not None:
            left = [quote_name(str(key)) for key in content if key != inner]
            notes += [f'"{inner}" is taken from {file}; left there: {", ".join(left)}'] * bool(left)
            content = content[inner]
    tensors = content if isinstance(content, Mapping) else {}
    tensors = {str(name): each for name, each in tensors.items() if isinstance(each, FileTensor)}
    if not tensors:
        raise CheckpointError(f"{file} holds no dictionary of tensors")
    for prefix in WRAPPERS:
        tensors = _without(prefix, tensors)
    return tensors


def _without(prefix: str, tensors: dict[str, FileTensor]) -> dict[str, FileTensor]:
    """Remove a prefix from the names if every name has it."""
    if not all(name.startswith(prefix) for name in tensors):
        return tensors
    return {name.removeprefix(prefix): each for name, each in tensors.items()}


def _config_beside(file: Path, found: Collection[str]) -> tuple[ModelConfig, dict[str, Any]]:
    settings = read_config(file.parent)
    if settings is None:
        raise CheckpointError(
            f"{file} does not say what model it is of, and has no {CONFIG} beside it",
            "describe the model with --recipe",
        )
    return _config_of(settings, found, file.parent), settings


def _newest(path: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint whose files have the names and sizes of its manifest."""
    reasons = []
    for folder in candidates(path) if path.is_dir() else []:
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            reasons.append(error.message)
            continue
        problems = check_listing(folder, manifest)
        if not problems:
            return folder, manifest
        reasons += [f"{folder.name}: {problem}" for problem in problems]
    raise CheckpointError(
        list_problems(f"no checkpoint in {path} is complete:", reasons)
        if reasons
        else f"no checkpoint in {path}" + ("" if path.exists() else ": no such folder")
    )


def _check_file(folder: Path, manifest: Manifest, name: str) -> str:
    for problem in check_hashes(folder, {name: manifest.files[name]}):
        raise CheckpointError(f"{folder}: {problem}", "restore it from a copy")
    return ""


def rows_of(found: Mapping[str, Shape], name: str | None) -> int:
    """Return the number of rows of a tensor, such as the vocabulary size of the embedding.

    A missing tensor gives 1, so that the later comparison of names reports the tensor as missing.
    """
    shape = found.get(name or "", ())
    return max(1, shape[0]) if shape else 1


def family_of(settings: Mapping[str, Any], place: Path) -> type[ModelConfig]:
    """Return the config class for the `model_type` of a config.json.

    Args:
        settings: the content of config.json.
        place: the folder of config.json, for messages.

    Raises:
        CheckpointError: no model of ours has this type.
    """
    kind = settings.get("model_type")
    families = {name: models[name].layout.hf_possible.get("model_type", ()) for name in models}
    for name, kinds in families.items():
        if isinstance(kind, str) and kind in kinds:
            return models[name]
    known = ", ".join(sorted(str(kind) for kinds in families.values() for kind in kinds))
    raise CheckpointError(
        f"{place / 'config.json'}: no model of ours is of the type {str(kind)[:80]!r}",
        f"known: {known}",
    )
