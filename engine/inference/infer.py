"""Predicts the records of some files with any task, over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..data.batch import Batch
from ..data.tables import Data
from ..observe.metrics import replace_non_finite
from ..sources.configs import SourceConfig
from ..tasks.tables import LossConfig, TaskConfig
from ..tasks.task import Task
from ..tokenizers.tokenizer import Tokenizer
from .inputs import find_texts
from .open import OpenedModel, OpenedParts
from .record_batches import ReadRecord, RecordBatches, share_columns
from .score import gather_objects


@dataclass(frozen=True)
class InferOptions:
    """How records are predicted.

    Attributes:
        batch_size: records computed together on a rank.
        seq_len: the most tokens of a record; None takes that of training.
        on_long: what happens to longer ones, "error" or "truncate"; None does as training did.
        echo: fields of the record that are written beside the prediction.
    """

    batch_size: int = 8
    seq_len: int | None = None
    on_long: Literal["error", "truncate"] | None = None
    echo: Sequence[str] = ()


def infer(
    opened: OpenedModel,
    data: str | Path | Sequence[str | Path],
    *,
    batch_size: int = 8,
    seq_len: int | None = None,
    on_long: Literal["error", "truncate"] | None = None,
    echo: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the prediction of each record, as `trainer infer` writes them.

    Args:
        opened: the result of `open_model`.
        data: a file, folder or glob of .jsonl, .parquet or text, or several.
        batch_size: records computed together.
        seq_len: the most tokens of a record; None takes that of training.
        on_long: what happens to longer ones; None does as training did.
        echo: fields of the record to repeat.

    Raises:
        RecipeError: the task predicts nothing of single records, or the data has no such records.
        DataError: a record cannot be read or is too long.
    """
    paths = [data] if isinstance(data, str | Path) else data
    options = InferOptions(batch_size, seq_len, on_long, tuple(echo))
    sources = [find_texts(str(path)) for path in paths]
    recipe = opened.recipe
    batches = open_records(
        (recipe.task, recipe.loss), recipe.data, opened.tokenizer, sources, options
    )
    yield from predict(opened, batches)


def open_records(
    task: tuple[TaskConfig, LossConfig],
    table: Data,
    tokenizer: Tokenizer,
    sources: Sequence[SourceConfig],
    options: InferOptions,
    *,
    is_labelled: bool = False,
) -> RecordBatches:
    """Return batches of the records of sources; see `RecordBatches`.

    Args:
        task: the recipe's `[task]` and `[loss]`.
        table: the recipe's `[data]`.
        tokenizer: the tokenizer of the model.
        sources: the sources of the records.
        options: how records are read.
        is_labelled: whether records have what is to be predicted.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return RecordBatches(
        *task,
        tokenizer,
        [share_columns(source, table.sources) for source in sources],
        options.batch_size,
        options.seq_len or table.largest.seq_len,
        options.on_long or ("truncate" if table.on_long == "truncate" else "error"),
        is_labelled,
        options.echo,
        dist.get_rank() if ranks > 1 else 0,
        ranks,
    )


def predict(
    opened: OpenedModel, batches: RecordBatches, num_done: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a prediction for each record, in the order of the records, on all ranks.

    Args:
        opened: the model.
        batches: the records.
        num_done: records whose predictions are known already, and are not yielded.

    Raises:
        RecipeError: the task predicts nothing of single samples.
        DataError: a record cannot be read or is too long.
    """
    parts, task = opened.build_task(with_frozen=False)
    # Batches begin where they would without the records that are done: other batches would be
    # padded otherwise, and their numbers rounded otherwise.
    first, left_out = divmod(num_done, batches.size)
    for dealt in batches.deal(first):
        found = _predict_batch(opened, parts, task, dealt.batch)
        rows = [_describe(record, found, opened) for record in dealt.records]
        for rank_rows in gather_objects(rows):
            yield from rank_rows[left_out:]
            left_out = max(left_out - len(rank_rows), 0)


@torch.no_grad()
def _predict_batch(
    opened: OpenedModel, parts: OpenedParts, task: Task[Any], batch: Batch | None
) -> Iterator[dict[str, Any]]:
    """Return the predictions of a batch; without one, compute as the other ranks do."""
    model, is_alone = parts.parallel_model.model, parts.plan.degrees.world == 1
    if batch is None and is_alone:
        return iter(())
    rows = parts.plan.take(task.example(1) if batch is None else batch, model)
    rows = rows.to(parts.plan.device)
    record = task.output_record(rows)
    task.forward(model, rows, record)
    if batch is None:
        return iter(())
    recipe = opened.recipe
    return iter(task.predict(rows, record, recipe.task.outputs(recipe.loss)))


def _describe(
    record: ReadRecord, found: Iterator[dict[str, Any]], opened: OpenedModel
) -> dict[str, Any]:
    """Return the line of a record: what is echoed, and the prediction or the fault."""
    echoed = {"record": dict(record.echoed)} if record.echoed else {}
    if record.sample is None:
        return {**echoed, "error": record.fault}
    task, tokenizer = opened.recipe.task, opened.tokenizer
    prediction = task.build_prediction(next(found), record.values, tokenizer)
    row: dict[str, Any] = replace_non_finite({**echoed, **prediction})
    return row
