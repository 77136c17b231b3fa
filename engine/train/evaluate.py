"""Loss on the validation split."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..data.batch import IGNORED, Batch
from ..loss.record import forward_loss

if TYPE_CHECKING:
    from ...model_zoo.language_model import LanguageModel
    from ..assemble import Parts
    from ..loss.configs import LossFunction
    from ..parallel.mesh import Degrees
    from ..parallel.pipeline import Pipeline


def validate(parts: Parts) -> dict[str, float]:
    """Return loss and perplexity on the validation split: of the averaged weights if there are any.

    All ranks together; each gets the same numbers.
    """
    with parts.average.in_place() if parts.average else nullcontext():
        loss = evaluate(
            parts.model,
            parts.validation,
            parts.step.loss,
            parts.device,
            parts.degrees,
            parts.parallelized.pipeline,
        )
    return {"loss": loss, "perplexity": perplexity(loss)}


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
) -> float:
    """Return the task's mean loss over the valid tokens of all batches on all ranks.

    Every rank must hold the same number of batches.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        batch = batch.to(device)
        if pipeline:
            parts = pipeline.evaluate(batch, loss)
        else:
            _, parts = forward_loss(model, batch, loss)
        if pipeline is None or pipeline.has_end:
            sums[0] += parts[1]
            sums[1] += (batch.labels != IGNORED).sum()
    if degrees.world > 1:
        dist.all_reduce(sums)  # those of ranks with the same tokens too: only the ratio counts
    model.train()
    total, tokens = sums.tolist()
    return float(total / max(tokens, 1))
