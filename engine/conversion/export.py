"""Exports a trained model as a Hugging Face folder, which all ranks write together."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...model_zoo.config import ModelConfig
from ...model_zoo.layout import Layout, Part
from ..checkpoint.box import contiguous_box, holds_rows
from ..checkpoint.chunks import FileLayout
from ..checkpoint.commit import explain_write_errors
from ..checkpoint.ranks import Ranks
from ..checkpoint.tensors import InMemoryTensor, row_bytes
from ..core.unfinished import Unfinished
from ..formats.hf_folder import CONFIG
from ..formats.hf_layout import rows_to_hf
from ..tokenizers.tokenizer import Tokenizer
from .hf_files import (
    GENERATION,
    build_config_json,
    build_generation_json,
    build_index,
    find_main_dtype,
    lay_out,
    write_json,
)
from .source_weights import hf_parts
from .writing import Extent, create_file, split_into_extents, sync, write_all

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def export_huggingface(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 * 10**9,
    group: ProcessGroup | None = None,
) -> None:
    """Write safetensors, config.json and the tokenizer's files. All ranks must call it.

    Each rank writes the rows that it holds, and replicated weights are divided between the ranks.
    The folder appears under its name only when it is complete.

    Args:
        folder: path on a file system that all ranks share; it must not exist.
        weights: plain tensors or DTensors by our parameter names. Ranks may hold different weights,
            but a DTensor must be present on all ranks of its device mesh.
        config: the model's config with the real vocabulary size.
        tokenizer: the tokenizer, whose files are written beside the weights.
        dtype: the dtype of the files; None keeps the dtype of each tensor.
        shard_bytes: largest size of a file in bytes, unless one tensor is larger.
        group: a gloo process group of all ranks; None for a single process.

    Raises:
        RecipeError: the folder exists.
        CheckpointError: the model has no Hugging Face names, or writing failed. No partial folder
            is left.
    """
    ranks = Ranks(group)
    table = ranks.reduce(
        lambda: _list_weights(weights, config, dtype), partial(_merge_lists, config.layout)
    )
    forms = {
        part.name: (entry.dtype, part.stored_shape)
        for entry in table.values()
        for part in entry.parts
    }
    shards = lay_out(forms, shard_bytes)
    begun: list[Unfinished] = []  # on rank 0
    place = ranks.reduce(lambda: None, lambda _: str(_begin(folder, shards, begun)))
    temporary = Path(place)
    files = {
        theirs: (temporary / file, offset)
        for file, layout in shards.items()
        for theirs, offset in layout.offsets.items()
    }
    places = {
        ours: [_Place(part, *files[part.name], entry.dtype) for part in entry.parts]
        for ours, entry in table.items()
        if ours in weights
    }
    # Replicated weights are assigned round robin, so that the ranks write about equally much.
    turns = {
        ours: entry.holders[number % len(entry.holders)]
        for number, (ours, entry) in enumerate(table.items())
    }
    mine = {ours for ours, rank in turns.items() if rank == ranks.rank}
    try:
        ranks.reduce(lambda: _write_own_rows(weights, places, mine), lambda _: None)
        failure = _write_gathered(weights, places, mine)
        ranks.reduce(lambda: _raise_failure(failure), lambda _: None)
        settings = build_config_json(config, find_main_dtype(forms), tokenizer.eos_id)
        small = build_index(shards, forms)
        ranks.reduce(lambda: None, lambda _: _finish(begun[0], small, settings, tokenizer))
    except BaseException:
        for each in begun:
            each.discard()
        raise


@dataclass
class _Entry:
    """A weight: its Hugging Face tensors, its target dtype, and the ranks that hold it."""

    parts: list[Part]
    dtype: torch.dtype
    holders: list[int]


@dataclass(frozen=True)
class _Place:
    """The position at which one Hugging Face tensor is written; `offset` is in bytes."""

    part: Part
    file: Path
    offset: int
    dtype: torch.dtype


def _list_weights(
    weights: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype | None
) -> dict[str, tuple[list[Part], torch.dtype]]:
    """Return the Hugging Face tensors and the target dtype of each weight on this rank."""
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return {
        ours: (parts, dtype or weights[ours].dtype)
        for ours, parts in hf_parts(shapes, config).items()
    }


def _merge_lists(
    layout: Layout, found: list[dict[str, tuple[list[Part], torch.dtype]]]
) -> dict[str, _Entry]:
    """Merge the lists of all ranks, in rank order, into one table in the order of the model."""
    table: dict[str, _Entry] = {}
    for rank, mine in enumerate(found):
        for ours, (parts, dtype) in mine.items():
            table.setdefault(ours, _Entry(parts, dtype, [])).holders.append(rank)

    def place(name: str) -> tuple[int, int]:
        block = name.removeprefix(f"{layout.blocks}.").partition(".")[0]
        if name.startswith(f"{layout.blocks}.") and block.isdecimal():
            return 1, int(block)
        return 2 * name.startswith(f"{layout.head}."), 0

    return {name: table[name] for name in sorted(table, key=place)}


def _begin(folder: Path, shards: Mapping[str, FileLayout], begun: list[Unfinished]) -> Path:
    """Create a temporary folder with files of their final sizes and headers. Runs on rank 0 only.

    Args:
        folder: the final path.
        shards: the layout of each file by file name.
        begun: the unfinished folder is appended, so that the caller can discard it after an error.

    Returns:
        The path of the temporary folder.
    """
    unfinished = Unfinished(folder)
    try:
        with explain_write_errors(folder.parent, sum(layout.size for layout in shards.values())):
            unfinished.path.mkdir()
            for file, layout in shards.items():
                create_file(unfinished.path / file, layout.size, layout.head)
    except BaseException:
        unfinished.discard()
        raise
    begun.append(unfinished)
    return unfinished.path


def _write_own_rows(
    weights: Mapping[str, Tensor], places: Mapping[str, list[_Place]], mine: Container[str]
) -> None:
    """Write the rows that this rank holds, without communication."""
    todo: list[Extent] = []
    for name, parts in places.items():
        found = _own_rows(weights[name], name in mine)
        if found is not None:
            todo += _extents(parts, *found)
    _write(todo)


def _write_gathered(
    weights: Mapping[str, Tensor], places: Mapping[str, list[_Place]], mine: Container[str]
) -> Exception | None:
    """Gather the tensors that are not sharded by rows, one at a time, and write those of this rank.

    Gathering is a collective: a rank that cannot write still takes part, or the others would hang.

    Returns:
        The error of this rank's first failed write, or None.
    """
    failure: Exception | None = None
    for name in (name for name in places if _must_gather(weights[name])):
        whole = cast("DTensor", weights[name].detach()).full_tensor()
        if name not in mine or failure is not None:
            continue
        try:
            _write(list(_extents(places[name], whole, 0)))
        except Exception as error:
            failure = error
    return failure


def _own_rows(tensor: Tensor, is_my_turn: bool) -> tuple[Tensor, int] | None:
    """Return the rows that this rank must write, and the index of the first, or None.

    Args:
        tensor: a weight, plain or sharded.
        is_my_turn: True if this rank was chosen to write the weight when it is replicated.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return (tensor, 0) if is_my_turn else None
    sharded = cast("DTensor", tensor.detach())
    box, coordinate = contiguous_box(sharded), sharded.device_mesh.get_coordinate()
    if box is None or coordinate is None or not holds_rows(sharded):
        return None
    placed = zip(coordinate, sharded.placements, strict=True)
    if any(at for at, placement in placed if placement.is_replicate()):
        return None  # another rank holds the same rows
    return sharded.to_local(), box.start[0]


def _must_gather(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return not is_plain and not holds_rows(cast("DTensor", tensor))


def _extents(places: list[_Place], rows: Tensor, first_row: int) -> Iterator[Extent]:
    """Yield the file extents that hold some rows of a weight.

    Args:
        places: the Hugging Face tensors of the weight and their file positions.
        rows: consecutive rows of our weight.
        first_row: index of the first of these rows in the weight.
    """
    for place in places:
        part, held, start = place.part, rows, first_row
        if part.form:
            held = rows_to_hf(rows, part.form)
        elif len(part.shape) < rows.dim():  # one of a stack of matrices
            number, start = part.start[0] - first_row, 0
            if not 0 <= number < len(rows):
                continue
            held = rows[(number, *part.start[1 : -len(part.shape)])]
        first = start + (part.inside[0] if part.inside else 0)
        offset = place.offset + first * row_bytes(part.shape, place.dtype)
        yield from split_into_extents(
            place.file, offset, InMemoryTensor(held), place.dtype, part.name
        )


def _write(todo: list[Extent]) -> None:
    files = sorted({extent.file for extent in todo})
    if files:
        with explain_write_errors(files[0].parent, 0):
            write_all(todo, lambda _: None)
            sync(files)


def _raise_failure(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _finish(
    unfinished: Unfinished,
    small: Mapping[str, str],
    settings: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> None:
    """Write the index, configs and tokenizer, then rename the folder. Runs on rank 0 only."""
    temporary = unfinished.path
    with explain_write_errors(unfinished.target.parent, 0):
        for name, text in small.items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_json(temporary / CONFIG, settings)
        write_json(temporary / GENERATION, build_generation_json(tokenizer.eos_id))
        tokenizer.save(temporary)
        sync(sorted(temporary.iterdir()))
        unfinished.publish()
