"""Loss on the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...model_zoo.language_model import LanguageModel, LossFunction
from ..core import faults
from ..core.heartbeat import heartbeat
from ..data.batch import Batch, count_label_bytes
from ..launch.signals import StopFlag, StopRequested
from ..parallel.mesh import Degrees
from .parts import Parts
from .step import count_tokens, forward_loss

if TYPE_CHECKING:
    from ..parallel.pipeline.pipeline import Pipeline


def validate(parts: Parts, stop: StopFlag | None = None) -> dict[str, float]:
    """Measure the validation split, on all ranks together, with the averaged weights if any.

    Bits per byte compare models of different tokenizers; some tokenizers do not know them.

    Args:
        parts: the parts of the run, whose validation batches are read.
        stop: asked before each batch; None never stops.

    Returns:
        `loss`, `perplexity`, `bits_per_byte` and the loss of each source, the same on all ranks.

    Raises:
        StopRequested: on all ranks, because a signal asked one of them to stop.
    """
    sources = parts.data.validation.separate_labels if parts.data.validation else ()
    with parts.average.swap_in() if parts.average else nullcontext():
        losses = evaluate(
            parts.model,
            stop_on_signal(parts.validation, stop) if stop else parts.validation,
            parts.step.loss,
            parts.device,
            parts.degrees,
            parts.parallel_model.pipeline,
            sources,
            count_label_bytes(parts.validation, parts.tokenizer),
        )
    loss = losses.pop("loss")
    return {"loss": loss, "perplexity": perplexity(loss), **losses}


def stop_on_signal(batches: Iterable[Batch], stop: StopFlag) -> Iterator[Batch]:
    """Yield batches until a signal asks any rank to stop.

    Args:
        batches: this rank's batches, equally many on each rank.
        stop: knows whether a signal came.

    Raises:
        StopRequested: a signal came.
    """
    for number, batch in enumerate(batches):
        faults.point("train.evaluate", step=number)
        if stop.agree():
            raise StopRequested
        # One process may give up within a batch (the first one compiles). Of several ranks none
        # may: the others would wait for it in a collective.
        with stop.interruptible() if stop.is_alone else nullcontext():
            yield batch


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    batches: Iterable[Batch],
    loss: LossFunction,
    device: torch.device,
    degrees: Degrees,
    pipeline: Pipeline | None = None,
    sources: Sequence[str] = (),
    num_bytes: int | None = None,
) -> dict[str, float]:
    """Measure the mean task loss over the valid tokens of all batches on all ranks.

    Args:
        model: the unwrapped module.
        batches: this rank's batches, equally many on each rank.
        loss: the loss function of the recipe.
        device: the device of the model.
        degrees: the ranks along each axis.
        pipeline: the pipeline of a model that is split into stages.
        sources: what metrics call the sources whose losses are reported apart.
        num_bytes: bytes of the text that this rank's labels stand for, if known.

    Returns:
        `loss`, `bits_per_byte` if bytes are known, and `loss/NAME` of each source with tokens.
    """
    model.eval()
    num_sources = len(sources)
    # Rows: loss, tokens, bytes; columns: all sources, then each.
    sums = torch.zeros(3, 1 + num_sources, dtype=torch.float64, device=device)
    # Stages other than the last have no loss, and count no tokens.
    if pipeline is None or pipeline.has_end:
        sums[2, 0] = num_bytes or 0
    for batch in batches:
        heartbeat.touch()  # each batch is progress: a long evaluation is no hang
        batch = batch.to(device)
        if pipeline:
            batch_sums = pipeline.evaluate(batch, loss, num_sources)
        else:
            _, batch_sums = forward_loss(model, batch, loss, num_sources)
        if pipeline is None or pipeline.has_end:
            sums[0] += batch_sums[1:]
            sums[1] += count_tokens(batch, num_sources)
    if degrees.world > 1:
        # Ranks with the same tokens add them several times: the ratios below do not change.
        dist.all_reduce(sums)
    model.train()
    totals, tokens, (total_bytes, *_) = sums.tolist()
    means = {"loss": totals[0] / max(tokens[0], 1)}
    if total_bytes:
        means["bits_per_byte"] = totals[0] / (math.log(2) * total_bytes)
    return means | {
        f"loss/{label}": total / count
        for label, total, count in zip(sources, totals[1:], tokens[1:], strict=True)
        if count
    }
