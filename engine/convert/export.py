"""A trained model as a Hugging Face folder, written by all ranks together."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..checkpoint.disk import writing
from ..checkpoint.hf_folder import CONFIG, listed
from ..checkpoint.ranks import Ranks
from ..checkpoint.tensors import Form, Held, row_bytes
from ..errors import CheckpointError
from ..parallel.materialize import first_element
from .hf_files import GENERATION, config_json, generation_json, write_json
from .shards import Shard, index_of, lay_out, main_dtype
from .writing import (
    Stretch,
    create,
    discard,
    publish,
    stretches,
    sync,
    temporary_beside,
    write_all,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

    from ...model_zoo.config import ModelConfig
    from ...model_zoo.layout import Layout
    from ..data.tokenizer import Tokenizer


Place = tuple[Path, int, torch.dtype]
"""file, offset and dtype of a tensor"""


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
    """Write safetensors, config.json and the tokenizer's files; all ranks call it.

    Each rank writes the rows that it holds; what all hold alike is divided between them. The folder
    appears when it is complete.

    Args:
        folder: must not exist, and must be seen by all ranks.
        weights: by our parameter names; plain tensors, or DTensors. Ranks may have different ones;
            a DTensor is on all ranks of its mesh.
        config: with its vocabulary settled.
        dtype: of the files; default: that of each tensor.
        shard_bytes: no file is larger, unless one tensor is.
        group: a gloo group of all ranks; None: one process.

    Raises:
        RecipeError: the folder exists.
        CheckpointError: the model has no Hugging Face names, or writing failed; nothing is left.
    """
    ranks = Ranks(group)
    table = ranks.reduce(lambda: _listed(weights, config, dtype), partial(_merged, config.layout))
    names = {ours: entry.name for ours, entry in table.items()}
    forms = {entry.name: entry.form for entry in table.values()}
    shards = lay_out(forms, shard_bytes)
    place = ranks.reduce(lambda: None, lambda _: str(_begin(folder, shards)))
    temporary = Path(place)
    places = {
        ours: (temporary / shard.file, shard.offsets[theirs], forms[theirs][0])
        for shard in shards
        for ours, theirs in names.items()
        if theirs in shard.offsets and ours in weights
    }
    # What several ranks hold alike is written in turns.
    turns = {
        ours: entry.holders[number % len(entry.holders)]
        for number, (ours, entry) in enumerate(table.items())
    }
    mine = {ours for ours, rank in turns.items() if rank == ranks.rank}
    try:
        ranks.reduce(lambda: _write_own_rows(weights, places, mine), lambda _: None)
        failure = _write_gathered(weights, places, mine)
        ranks.reduce(lambda: _settle(failure), lambda _: None)
        settings = config_json(config, main_dtype(forms), tokenizer.eos_id)
        small = index_of(shards, forms)
        ranks.reduce(lambda: None, lambda _: _finish(temporary, folder, small, settings, tokenizer))
    except BaseException:
        if ranks.rank == 0:
            discard(temporary)
        raise


@dataclass
class _Entry:
    """A weight that some rank holds, and the ranks that do."""

    name: str
    form: Form
    holders: list[int]


def _listed(
    weights: Mapping[str, Tensor], config: ModelConfig, dtype: torch.dtype | None
) -> dict[str, tuple[str, Form]]:
    """Return name there, dtype and shape of this rank's weights."""
    return {
        ours: (theirs, (dtype or weights[ours].dtype, tuple(weights[ours].shape)))
        for ours, theirs in hf_names(weights, config).items()
    }


def _merged(layout: Layout, parts: list[dict[str, tuple[str, Form]]]) -> dict[str, _Entry]:
    """Return the weights of all ranks, in the order of the model."""
    table: dict[str, _Entry] = {}
    for rank, part in enumerate(parts):
        for ours, (theirs, form) in part.items():
            table.setdefault(ours, _Entry(theirs, form, [])).holders.append(rank)

    def place(name: str) -> tuple[int, int]:
        block = name.removeprefix(f"{layout.blocks}.").partition(".")[0]
        if name.startswith(f"{layout.blocks}.") and block.isdecimal():
            return 1, int(block)
        return 2 * name.startswith(f"{layout.head}."), 0

    return {name: table[name] for name in sorted(table, key=place)}


def hf_names(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, str]:
    """Return Hugging Face's name of each weight.

    Raises:
        CheckpointError: the table of the model has none for some.
    """
    found = {name: config.layout.to_hf(name) for name in weights}
    nameless = [
        f'{name}: model "{config.name}" has no Hugging Face name for it'
        for name, theirs in found.items()
        if theirs is None
    ]
    if nameless:
        raise CheckpointError(listed("the model cannot be exported:", nameless))
    return {name: theirs for name, theirs in found.items() if theirs is not None}


def _begin(folder: Path, shards: list[Shard]) -> Path:
    """Make a folder beside the final one, with files of their final sizes; on rank 0."""
    temporary = temporary_beside(folder)
    with writing(folder.parent, sum(shard.size for shard in shards)):
        temporary.mkdir()
        for shard in shards:
            create(temporary / shard.file, shard.size, shard.head)
    return temporary


def _write_own_rows(
    weights: Mapping[str, Tensor], places: Mapping[str, Place], mine: Container[str]
) -> None:
    """Write the rows that this rank holds, without communication."""
    todo: list[Stretch] = []
    for name, place in places.items():
        found = _own_rows(weights[name], name in mine)
        if found is not None:
            todo += _stretches(place, *found)
    _write(todo)


def _write_gathered(
    weights: Mapping[str, Tensor], places: Mapping[str, Place], mine: Container[str]
) -> Exception | None:
    """Write tensors that are cut other than by rows, gathered one at a time, in turns.

    A rank that cannot write goes on gathering, for the others; its failure is returned.
    """
    failure: Exception | None = None
    for name in (name for name in places if _is_cut_otherwise(weights[name])):
        whole = cast("DTensor", weights[name].detach()).full_tensor()
        if name not in mine or failure is not None:
            continue
        try:
            _write(list(_stretches(places[name], whole, 0)))
        except Exception as error:
            failure = error
    return failure


def _own_rows(tensor: Tensor, is_my_turn: bool) -> tuple[Tensor, int] | None:
    """Return the rows that are this rank's to write, and the first one's number."""
    if type(tensor) in (Tensor, nn.Parameter):
        return (tensor, 0) if is_my_turn else None
    sharded = cast("DTensor", tensor.detach())
    start, coordinate = first_element(sharded), sharded.device_mesh.get_coordinate()
    if start is None or coordinate is None:
        return None
    placed = zip(coordinate, sharded.placements, strict=True)
    if any(at for at, placement in placed if placement.is_replicate()):
        return None  # another rank holds the same rows
    return sharded.to_local(), start // max(1, tensor.shape[1:].numel())


def _is_cut_otherwise(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return not is_plain and first_element(cast("DTensor", tensor)) is None


def _stretches(place: Place, rows: Tensor, first_row: int) -> Iterator[Stretch]:
    file, offset, dtype = place
    start = offset + first_row * row_bytes(tuple(rows.shape), dtype)
    return stretches(file, start, Held(rows), dtype)


def _write(todo: list[Stretch]) -> None:
    files = sorted({stretch.file for stretch in todo})
    if files:
        with writing(files[0].parent, 0):
            write_all(todo, lambda _: None)
            sync(files)


def _settle(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _finish(
    temporary: Path,
    folder: Path,
    small: Mapping[str, str],
    settings: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> None:
    """Write the small files and publish; on rank 0."""
    with writing(folder.parent, 0):
        for name, text in small.items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_json(temporary / CONFIG, settings)
        write_json(temporary / GENERATION, generation_json(tokenizer.eos_id))
        tokenizer.save(temporary)
        sync(sorted(temporary.iterdir()))
        publish(temporary, folder)
