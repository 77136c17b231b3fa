"""What the ends of a model cost beside its blocks, measured where the run will compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ....model_zoo.language_model import LanguageModel, LossFunction
from ..materialize import materialize, without_storage
from .cut import EndCosts, num_micro_batches

if TYPE_CHECKING:
    from ....kernels.choose import Kernels
    from ....model_zoo.config import ModelConfig
    from ...data.tables import Data
    from ..plan import Plan

WARMUP, REPEATS = 3, 5


def measure_costs(
    config: ModelConfig,
    kernels: Kernels,
    loss: LossFunction,
    data: Data,
    dtype: torch.dtype,
    plan: Plan,
) -> tuple[EndCosts, str]:
    """Return rank 0's measurement, on all ranks, and a note of it; all ranks call it.

    Forward and backward of a micro batch through a model of one block, which is neither recomputed
    nor compiled.

    Args:
        config: the model's, with its vocabulary settled.
        kernels: of one device.
        loss: that the run computes.
        data: how many rows of how many tokens a micro batch has.
        dtype: to compute in.
        plan: of this rank.
    """
    seconds = torch.zeros(3, dtype=torch.float64, device=plan.device)
    if plan.rank == 0:
        with without_storage():
            model = config.model_copy(update={"n_layers": 1}).build(kernels)
        model.compute_dtype = dtype
        share = data.global_batch // plan.degrees.data
        rows = share // num_micro_batches(plan.table.pipelining, data.micro_batch, share)
        shape = (rows, data.seq_len // (plan.degrees.sequence // plan.degrees.tensor))
        seconds = seconds.new_tensor(part_seconds(model, loss, shape, config.vocab, plan.device))
        if plan.device.type == "cuda":  # the run's own peak is reported
            del model
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(plan.device)
    dist.broadcast(seconds, 0)
    embedding, block, head = seconds.tolist()
    times = (f"{1e3 * each:.3g} ms" for each in (embedding, block, head))
    note = "measured: embedding {}, a block {}, head {}".format(*times)
    return EndCosts(embedding / block, head / block), note


def part_seconds(
    model: LanguageModel,
    loss: LossFunction,
    shape: tuple[int, int],
    vocab: int,
    device: torch.device,
) -> tuple[float, float, float]:
    """Return the seconds of embedding, block and head with loss; the model has one block.

    Args:
        model: without memory.
        loss: of the head's output.
        shape: rows and tokens of a row.
        vocab: rows of the embedding.
        device: where to compute.
    """
    draw = torch.Generator(device).manual_seed(0)
    materialize(model, device, seed=0, fill=False)
    for weight in model.parameters():
        weight.data = torch.empty_like(weight, dtype=model.compute_dtype)
        weight.data.normal_(0, 0.02, generator=draw)
    tokens = torch.randint(vocab, shape, generator=draw, device=device)
    positions = torch.arange(shape[1], device=device).expand(shape)
    hidden = model(tokens, blocks=range(0)).detach().requires_grad_()
    inside = {"hidden": hidden, "positions": positions}

    def seconds(part: Callable[[], Tensor]) -> float:
        found = []
        for _ in range(WARMUP + REPEATS):
            _settle(device)
            start = time.perf_counter()
            out = part()
            out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
            _settle(device)
            found.append(time.perf_counter() - start)
            model.zero_grad()
            hidden.grad = None
        return median(found[WARMUP:])

    return (
        seconds(lambda: model(tokens, blocks=range(0))),
        seconds(lambda: model(None, blocks=range(1), **inside)),
        seconds(lambda: model(None, blocks=range(1, 2), labels=tokens, loss=loss, **inside)),
    )


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
