"""Opens a model in Meta's original format: params.json and consolidated.NN.pth."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from ...model_zoo.layout import translate
from ...model_zoo.llama3.config import Llama3Config
from ...model_zoo.llama3.meta import COMPUTED, NAMES, ROTATED, config_from_params
from ..checkpoint.tensors import FileTensor, TensorRows, differs
from ..checkpoint.torch_file import check_records
from ..core.errors import CheckpointError
from ..formats.hf_json import read_json
from ..formats.hf_layout import Interleaved
from ..formats.hf_match import Shape
from ..recipe.schema import Recipe
from .meta_experts import open_llama4
from .meta_join import cut_dim, join
from .source_weights import SourceWeights, config_or_error, parameter_shapes, require_match
from .sources import read_state_dict, rows_of

PARAMS = "params.json"
MAX_PARAMS_BYTES = 2**20
EMBED, HEAD = "embed.weight", "head.proj.weight"


def open_meta(folder: Path, recipe: Recipe | None) -> SourceWeights:
    """Open a folder in Meta's format; concatenate the files and convert the rotary layout to ours.

    Args:
        folder: a folder with params.json and consolidated.00.pth and the files that follow it.
        recipe: a recipe that describes the model; None takes the sizes in params.json.

    Raises:
        CheckpointError: the folder cannot be read or does not fit the model. The message lists
            every mismatch.
    """
    files = _consolidated(folder)
    params = read_json(folder / PARAMS, MAX_PARAMS_BYTES)
    parts: list[dict[str, FileTensor]] = [
        {name: each for name, each in read_state_dict(file, []).items() if name != COMPUTED}
        for file in files
    ]
    # Some files of Llama 4 have the sizes below a key.
    params = params.get("model", params)
    if isinstance(params, dict) and params.get("moe_args"):
        if recipe is not None:
            raise CheckpointError("of Llama 4 params.json says the sizes", "leave out --recipe")
        opened = open_llama4(folder, params, parts)
        opened.checks = [partial(check_records, file) for file in files]
        return opened
    first = {name: each.shape for name, each in parts[0].items()}
    rows = rows_of(first, NAMES[HEAD]) * len(files)
    make = partial(config_from_params, params, rows)
    config = cast("Llama3Config", config_or_error(make, folder / PARAMS))
    if recipe is not None:
        config = _llama3(recipe).with_vocab(rows)
    # Every file holds a slice of each tensor. The size check needs them all, under distinct names.
    counted = {
        f"{at} {name}": each.shape for at, part in enumerate(parts) for name, each in part.items()
    }
    shapes = parameter_shapes(config, counted, folder)
    if config.tie_embeddings and {NAMES[EMBED], NAMES[HEAD]} <= first.keys():
        # params.json does not say whether the embeddings are tied, so the two weights are compared.
        ends = [_join(name, shapes[EMBED], parts) for name in (NAMES[EMBED], NAMES[HEAD])]
        if recipe is None and differs(ends[1], ends[0], ends[0].dtype):
            config = config.model_copy(update={"tie_embeddings": False})
            shapes = parameter_shapes(config, counted, folder)
    elif recipe is None and NAMES[HEAD] not in first:
        config = config.model_copy(update={"tie_embeddings": True})
        shapes = parameter_shapes(config, counted, folder)
    sources = {name: translate(name, NAMES) or name for name in shapes}
    _require_match(folder, sources, shapes, parts)
    tensors = {
        name: _reorder_rotary(name, _join(theirs, shapes[name], parts), config)
        for name, theirs in sources.items()
    }
    checks = [partial(check_records, file) for file in files]
    return SourceWeights(folder, config, tensors, recipe, None, folder, checks=checks)


def _consolidated(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder", f"name the folder with {PARAMS}")
    found = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and re.fullmatch(r"consolidated\.\d\d\.pth", path.name)
    )
    expected = [f"consolidated.{number:02d}.pth" for number in range(max(1, len(found)))]
    if found != expected:
        there = f"; there are {', '.join(found)}" if found else ""
        raise CheckpointError(
            f"{folder} does not hold {expected[0]} and those after it{there}",
            "fetch the whole folder of the model, in Meta's original format",
        )
    return [folder / name for name in found]


def _llama3(recipe: Recipe) -> Llama3Config:
    if not isinstance(recipe.model, Llama3Config):
        raise CheckpointError(f'Meta\'s format holds a llama3, --recipe says "{recipe.model.name}"')
    return recipe.model


def _require_match(
    folder: Path,
    sources: Mapping[str, str],
    shapes: Mapping[str, Shape],
    parts: Sequence[Mapping[str, FileTensor]],
) -> None:
    for number, part in enumerate(parts):
        there = {name: each.shape for name, each in part.items()}
        wanted = {
            name: _share(parts[0].get(theirs), shapes[name], len(parts))
            for name, theirs in sources.items()
        }
        if NAMES[HEAD] not in sources.values():
            there.pop(NAMES[HEAD], None)  # equal to the embedding
        require_match(folder, sources, wanted, there, f"consolidated.{number:02d}.pth")


def _share(first: FileTensor | None, full: Shape, count: int) -> Shape:
    """Return the shape that a tensor must have in every file.

    Args:
        first: the tensor in the first file; None if it is missing there.
        full: shape of the whole tensor.
        count: the number of files.

    Returns:
        The shape in the first file if `count` such slices make the whole tensor, else `full`.
    """
    if first is None or (first.shape != full and cut_dim(first.shape, full, count) is None):
        return full
    return first.shape


def _join(name: str, full: Shape, parts: Sequence[Mapping[str, FileTensor]]) -> TensorRows:
    whole = join(name, full, parts)
    assert whole is not None, "its name was compared"
    return whole


def _reorder_rotary(name: str, tensor: TensorRows, config: Llama3Config) -> TensorRows:
    return (
        Interleaved(tensor, tensor.shape, config.head_width) if name.endswith(ROTATED) else tensor
    )
