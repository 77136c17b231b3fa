"""Loss on the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..data.batch import Batch
from ..heartbeat import heartbeat
from ..loss.record import count_tokens, forward_loss

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel
    from ..assemble import Parts
    from ..loss.configs import LossFunction
    from ..parallel.mesh import Degrees
    from ..parallel.pipeline import Pipeline


def validate(parts: Parts) -> dict[str, float]:
    """Return loss, perplexity and the loss of each source on the validation split.

    They are of the averaged weights if there are any. All ranks together; each gets the same
    numbers.
    """
    sources = parts.data.validation.separate_labels if parts.data.validation else ()
    with parts.average.in_place() if parts.average else nullcontext():
        losses = evaluate(
            parts.model,
            parts.validation,
            parts.step.loss,
            parts.device,
            parts.degrees,
            parts.parallelized.pipeline,
            sources,
        )
    loss = losses.pop("loss")
    return {"loss": loss, "perplexity": perplexity(loss), **losses}


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

    Returns:
        `loss`, and `loss/LABEL` of each source that has tokens.
    """
    model.eval()
    num_sources = len(sources)
    sums = torch.zeros(2, 1 + num_sources, dtype=torch.float64, device=device)
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
    totals, tokens = sums.tolist()
    means = {
        f"loss/{label}": total / count
        for label, total, count in zip(sources, totals[1:], tokens[1:], strict=True)
        if count
    }
    return {"loss": totals[0] / max(tokens[0], 1), **means}
