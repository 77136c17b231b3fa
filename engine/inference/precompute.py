"""Computes the outputs of a recipe's frozen model for all samples, and keeps them on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from ..assemble.build import build_task
from ..assemble.frozen import build_frozen
from ..assemble.precomputed import (
    FrozenOutputs,
    NamedSamples,
    name_samples,
    open_outputs,
    without_outputs,
)
from ..assemble.splits import open_further_splits
from ..core.errors import DataError, EnvironmentFault, RecipeError
from ..core.files import delete_folder
from ..core.text.display import describe_changes
from ..corpus.cache import hold_lock
from ..corpus.checksums import Share
from ..corpus.output_store import OutputWriter, read_output_manifest
from ..data.batch import Batch
from ..launch.environment import World
from ..lora.tables import LoRA
from ..parallel.plan import Plan, make_plan
from ..recipe.schema import Recipe
from ..tasks.frozen import FrozenModel
from ..tasks.tables import TaskData
from ..tasks.task import Task

Watch = Callable[[str, int, int], None]
"""gets the name of a split, the samples that are done, and all of them"""


@dataclass(frozen=True)
class _Positions(Batch):
    """The positions of a row, of which ranks of the context axis take parts."""

    positions: Tensor

    def split_sequence(self, take: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, positions=take(self.positions))


class _RankOutputs(NamedTuple):
    """What one rank knows of a block of samples.

    Attributes:
        data_rank: says which samples of the block these are.
        positions: [S / C], the positions of each row that it computed.
        columns: [rows] or [rows, S / C, ...] each.
    """

    data_rank: int
    positions: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class _Job:
    """What all splits are computed with.

    Attributes:
        task: asks the frozen model.
        frozen: the frozen model.
        plan: how ranks share it.
        group: all ranks, on the host; None for one process.
        size: samples of a forward pass on each data rank.
    """

    task: Task[Any]
    frozen: FrozenModel
    plan: Plan
    group: ProcessGroup | None
    size: int

    def compute(self, samples: NamedSamples, first: int) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the outputs of blocks of samples from `first` on; on ranks but 0 nothing in them.

        A block has `size` samples of each data rank, the last one fewer.
        """
        rows, plan = samples.samples.in_storage_order(), self.plan
        rows_per_sample, ranks = self.task.batch_class.rows_per_sample, plan.degrees.data
        for start in range(first, rows.rows_per_epoch, self.size * ranks):
            # A rank without samples repeats the last one: the forward pass needs every rank.
            mine = start + plan.data_rank * self.size + np.arange(self.size)
            batch = rows.gather(np.minimum(mine, rows.rows_per_epoch - 1)).to_batch()
            found = self._gather(self._ask(batch, samples.table.seq_len))
            joined = [
                _join([part for part in found if part.data_rank == rank])
                for rank in range(ranks if found else 0)
            ]
            block = {}
            for name in joined[0] if joined else ():
                column = np.concatenate([each[name] for each in joined])
                by_sample = column.reshape(-1, rows_per_sample, *column.shape[1:])
                block[name] = by_sample[: rows.rows_per_epoch - start]
            yield block

    def _ask(self, batch: Batch, seq_len: int) -> _RankOutputs | None:
        """Return what this rank knows of a batch; None if another rank knows the same."""
        plan, model = self.plan, self.frozen.model
        told = self.task.ask_frozen(plan.take(batch, model).to(plan.device))
        positions = plan.take(_Positions(torch.arange(seq_len)[None]), model).columns()
        # Ranks of the tensor axis, the last one of the mesh, have the same outputs.
        if not told or plan.rank % plan.degrees.tensor:
            return None
        columns = {name: column.cpu().numpy() for name, column in told.items()}
        return _RankOutputs(plan.data_rank, positions["positions"][0].numpy(), columns)

    def _gather(self, mine: _RankOutputs | None) -> list[_RankOutputs]:
        """Return what all ranks know, on rank 0 alone."""
        found: list[Any] = [mine]
        if self.group is not None:
            found = [None] * self.plan.degrees.world
            dist.gather_object(mine, found if self.plan.rank == 0 else None, group=self.group)
        return [each for each in found if each is not None]


def _join(parts: Sequence[_RankOutputs]) -> dict[str, NDArray[Any]]:
    """Return the outputs for the rows of a data rank, from those of the ranks that share them."""
    order = np.argsort(np.concatenate([part.positions for part in parts]))
    joined = {}
    for name, column in parts[0].columns.items():
        if column.ndim > 1:  # else a number a row, which each of these ranks has
            column = np.concatenate([part.columns[name] for part in parts], axis=1)[:, order]
        joined[name] = column
    return joined


def precompute(
    recipe: Recipe,
    world: World,
    device: torch.device,
    group: ProcessGroup | None = None,
    *,
    replace_others: bool = False,
    watch: Watch = lambda name, done, total: None,
) -> list[str]:
    """Write the outputs of a recipe's frozen model for the samples of all its splits.

    All ranks call it. What is complete stays, and what was interrupted continues.

    Args:
        recipe: the validated recipe, with `task.precomputed`.
        world: this process's place among the ranks.
        device: where this rank computes.
        group: all ranks, on the host; None for one process.
        replace_others: outputs of another model, data or settings may be replaced.
        watch: told of the progress, on rank 0.

    Returns:
        a sentence for each split.

    Raises:
        RecipeError: the task learns from no frozen model, or names none, or other outputs are
            there.
        DataError: a source cannot be read.
        EnvironmentFault: the folder cannot be written.
    """
    share = Share(world.rank, world.world_size, world.local_rank, world.local_world_size)
    tokenizer = recipe.tokenizer.build()
    outputs = open_outputs(recipe, tokenizer, share)
    if outputs is None:
        raise RecipeError(f'the task "{recipe.task.name}" learns from no frozen model')
    plan = make_plan(recipe.parallel, world.rank, world.world_size, device)
    # Adapters start as nothing: the model without them is the one that training starts from.
    recipe = without_outputs(recipe).model_copy(update={"data": recipe.data.padded, "lora": LoRA()})
    parts = build_frozen(recipe, tokenizer.vocab_size, tokenizer.fingerprint, device, plan)
    assert parts is not None, "a recipe with outputs has a frozen model"
    parts.materialize(torch.device("cpu") if recipe.parallel.fsdp.offload else device)
    frozen, built = parts.wrap(), parts.built
    task = build_task(recipe, built.kernels, built.config, tokenizer, (), frozen)
    table, degrees = recipe.data, plan.degrees
    size = max(min(table.micro_batch, table.global_batch // degrees.data), 1)
    job = _Job(task, frozen, plan, group, size)
    splits = _list_splits(recipe, TaskData(table, tokenizer, recipe.run.seed, "", share))
    lock = hold_lock(outputs.folder / ".lock", 0) if world.rank == 0 else nullcontext()
    try:
        with lock:
            notes = [
                _write(job, outputs, split, watch, replace_others=replace_others)
                for split in splits
            ]
    except OSError as error:
        message = f"{outputs.folder} cannot be written: {error.strerror or error}"
        raise EnvironmentFault(message, "give another --out") from error
    if group is not None:
        dist.barrier(group)  # rank 0 may still write the last index
    return notes


def _list_splits(recipe: Recipe, data: TaskData) -> Iterator[NamedSamples]:
    """Yield all samples that a run reads."""
    given = replace(data, loss=recipe.loss)
    yield from name_samples(recipe.task.build_data(given), recipe.data)
    if recipe.evaluate.is_enabled:
        yield from open_further_splits(recipe, given)


def _write(
    job: _Job, outputs: FrozenOutputs, split: NamedSamples, watch: Watch, *, replace_others: bool
) -> str:
    """Write the outputs for a split, unless they are there; return a sentence."""
    folder, total = outputs.folder / split.name, split.samples.rows_per_epoch
    writer, is_there = None, False
    if job.plan.rank == 0:
        origin = json.loads(json.dumps(outputs.describe(split)))
        is_there = _find_complete(folder, origin, replace_others=replace_others)
        writer = None if is_there else OutputWriter(folder, origin, total)
    done = [total if is_there else writer.num_done if writer else 0]
    if job.group is not None:
        dist.broadcast_object_list(done, group=job.group)
    if is_there:
        return f"{folder}: {total:,} samples, complete before"
    for block in job.compute(split, done[0]):
        if writer:
            writer.write(block)
            watch(split.name, writer.num_done, total)
    if writer:
        writer.finish()
    return f"{folder}: {total:,} samples"


def _find_complete(folder: Path, origin: Mapping[str, Any], *, replace_others: bool) -> bool:
    """Return whether outputs of this origin are complete; others are deleted, if they may be.

    Raises:
        RecipeError: outputs of another origin are there.
    """
    if not folder.exists():
        return False
    known: Mapping[str, Any] = {}
    with suppress(DataError):
        known = read_output_manifest(folder).origin
    if not (changes := describe_changes(known, origin)):
        return True
    if not replace_others:
        message = f"{folder} holds outputs of something else: {changes}"
        raise RecipeError(message, "give another --out, or --force to replace them")
    if problem := delete_folder(folder):
        raise EnvironmentFault(problem, "give another --out")
    return False
