"""Measures the time of a model's embedding and head relative to a block, on the run's device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ....model_zoo.base import Model
from ..materialize import materialize, without_storage
from .cut import EndCosts, num_micro_batches
from .objective import Objective

if TYPE_CHECKING:
    from ....kernels.choose import Kernels
    from ....model_zoo.config import ModelConfig
    from ...data.batch import Batch
    from ...data.tables import Data
    from ..plan import Plan

WARMUP, REPEATS = 3, 5


def measure_costs(
    config: ModelConfig,
    kernels: Kernels,
    objective: Objective,
    data: Data,
    dtype: torch.dtype,
    plan: Plan,
) -> tuple[EndCosts, str]:
    """Measure on rank 0, and return the costs and a line for the log on all ranks.

    All ranks call it. Rank 0 times the forward and backward passes of a micro batch through a model
    of one block, which is neither recomputed nor compiled.

    Args:
        config: the model's config, with the vocabulary settled.
        kernels: the implementations of one device.
        objective: what is learned.
        data: the recipe's `[data]`, which sets the rows of a micro batch.
        dtype: the dtype of computation.
        plan: the parallelism plan of this rank.
    """
    seconds = torch.zeros(3, dtype=torch.float64, device=plan.device)
    if plan.rank == 0:
        with without_storage():
            model = config.model_copy(update={"n_layers": 1}).build(kernels)
        model.compute_dtype = dtype
        share = data.global_batch // plan.degrees.data
        rows = share // num_micro_batches(plan.table.pipelining, data.micro_batch, share)
        # Tensor ranks share the matmuls of all positions: only context ranks shorten the rows.
        pieces = plan.degrees.sequence // plan.degrees.tensor
        batch = objective.example(rows).to(plan.device)
        batch = batch.split_sequence(lambda x: x[:, : x.shape[1] // pieces])
        parts = part_seconds(model, objective, batch, config.layout.embed, plan.device)
        seconds = seconds.new_tensor(parts)
        # Metrics report the peak memory of the run, which must not include this model's.
        if plan.device.type == "cuda":
            del model
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(plan.device)
    # All ranks must cut at the same blocks, and measurements differ from rank to rank.
    dist.broadcast(seconds, 0)
    embedding, block, head = seconds.tolist()
    times = (f"{1e3 * each:.3g} ms" for each in (embedding, block, head))
    note = "measured: embedding {}, a block {}, head {}".format(*times)
    return EndCosts(embedding / block, head / block), note


def part_seconds(
    model: Model,
    objective: Objective,
    batch: Batch,
    embed: str,
    device: torch.device,
) -> tuple[float, float, float]:
    """Return the seconds of forward and backward of embedding, block, and head with loss.

    Args:
        model: a model of one block, on the meta device.
        objective: what is learned.
        batch: rows of zeros, on the device.
        embed: path of the embedding, whose rows whole numbers in the input select.
        device: the device to compute on.
    """
    draw = torch.Generator(device).manual_seed(0)
    materialize(model, device, seed=0, fill=False)
    # Drawn on the device, because `materialize` would draw on the CPU. In the compute dtype, as
    # FSDP gathers weights: no cast from fp32 is timed.
    for weight in model.parameters():
        weight.data = torch.empty_like(weight, dtype=model.compute_dtype)
        weight.data.normal_(0, 0.02, generator=draw)
    x = objective.input(batch)
    if x.is_floating_point():
        x = torch.empty_like(x).normal_(generator=draw)
    else:
        # Random rows: repeated lookups of one row are faster than the lookups of training.
        num_rows = len(next(model.get_submodule(embed).parameters()))
        x = torch.randint(num_rows, x.shape, generator=draw, device=device)
    positions = torch.arange(x.shape[1], device=device).expand(x.shape[:2])
    # Block and head also compute their input's gradient, as they do inside a pipeline.
    hidden = model(x, blocks=range(0)).detach().requires_grad_()
    inside = {"hidden": hidden, "positions": positions}

    def with_loss() -> dict[str, Any]:
        return objective.loss_arguments(batch, objective.record(batch))

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
        seconds(lambda: model(x, blocks=range(0))),
        seconds(lambda: model(None, blocks=range(1), **inside)),
        seconds(lambda: model(x, blocks=range(1, 2), **inside, **with_loss())),
    )


def _settle(device: torch.device) -> None:
    # CUDA kernels run asynchronously: without this, the clock would measure their launches.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
