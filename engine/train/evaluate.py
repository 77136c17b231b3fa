"""Loss on the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..core import faults
from ..core.heartbeat import heartbeat
from ..data.batch import Batch, count_bytes
from ..launch.signals import StopRequested
from .step import count_tokens, forward_loss

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel, LossFunction
    from ..launch.signals import StopFlag
    from ..parallel.mesh import Degrees
    from ..parallel.pipeline.pipeline import Pipeline
    from .parts import Parts


def validate(parts: Parts, stop: StopFlag | None = None) -> dict[str, float]:
    """Return loss, perplexity, bits per byte and the loss of each source on the validation split.

    Bits per byte compare models of different tokenizers; some tokenizers cannot tell them. The
    numbers are of the averaged weights if there are any. All ranks together; each gets the same.

    Raises:
        StopRequested: on all ranks, because `stop` was set on one.
    """
    sources = parts.data.validation.separate_labels if parts.data.validation else ()
    with parts.average.in_place() if parts.average else nullcontext():
        losses = evaluate(
            parts.model,
            until_stopped(parts.validation, stop) if stop else parts.validation,
            parts.step.loss,
            parts.device,
            parts.degrees,
            parts.parallel_model.pipeline,
            sources,
            count_bytes(parts.validation, parts.tokenizer),
        )
    loss = losses.pop("loss")
    return {"loss": loss, "perplexity": perplexity(loss), **losses}


def until_stopped(batches: Iterable[Batch], stop: StopFlag) -> Iterator[Batch]:
    """Yield the batches until any rank is asked to stop; each has equally many.

    A process alone may also give up within a batch, such as the first one, which compiles.

    Raises:
        StopRequested: a rank was.
    """
    for number, batch in enumerate(batches):
        faults.point("train.evaluate", step=number)
        if stop.agree():
            raise StopRequested
        with stop.giving_up() if stop.is_alone else nullcontext():
            yield batch


def perplexity(loss: float) -> float:
    """Return exp(loss): infinity where that is too large for a number."""
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
    """Return the task's mean loss over the valid tokens of all batches on all ranks.

    Every rank must hold the same number of batches.

    Args:
        model: the bare module.
        batches: of this rank.
        loss: of the recipe.
        device: where the model is.
        degrees: of the ranks.
        pipeline: of the model, if it is cut into stages.
        sources: what metrics call the sources that losses are told apart by.
        num_bytes: of the text that this rank's labels stand for, if known.

    Returns:
        `loss`, `bits_per_byte` if bytes are known, and `loss/LABEL` of each source that has tokens.
    """
    model.eval()
    num_sources = len(sources)
    sums = torch.zeros(3, 1 + num_sources, dtype=torch.float64, device=device)
    if pipeline is None or pipeline.has_end:
        sums[2, 0] = num_bytes or 0
    for batch in batches:
        heartbeat.touch()
        batch = batch.to(device)
        if pipeline:
            found = pipeline.evaluate(batch, loss, num_sources)
        else:
            _, found = forward_loss(model, batch, loss, num_sources)
        if pipeline is None or pipeline.has_end:
            sums[0] += found[1:]
            sums[1] += count_tokens(batch, num_sources)
    if degrees.world > 1:
        dist.all_reduce(sums)  # those of ranks with the same tokens too: only the ratio counts
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
