"""Builds the observer of a run, with its profiler, from the run's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lora.sizes import flops_per_token
from ..observe.observer import Observer
from ..observe.throughput import SlowRanks, Throughput, device_peak_flops, peak_memory_bytes
from ..precision.hardware import dtype_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..assemble.assemble import Assembled
    from ..core.run_dir import RunDirectory
    from ..observe.profiler import Profiler
    from ..observe.progress import Progress


def open_observer(
    parts: Assembled, directory: RunDirectory, progress: Progress, group: ProcessGroup | None
) -> Observer:
    """Return what watches the run on this rank; its phases are those of the training step.

    Args:
        parts: of the run.
        directory: where rows and profiles go.
        progress: what prints.
        group: a gloo group of all ranks, which compares them; None in one process.
    """
    world, device = parts.world, parts.device
    peak = device_peak_flops(device, dtype_name(parts.model.compute_dtype))
    flops = flops_per_token(parts.model, parts.model_config, parts.recipe.data.seq_len)
    copies_alone = parts.degrees.world == parts.degrees.replicate
    ranks = SlowRanks(group, progress.warn, local_forward=copies_alone)
    observer = Observer(
        parts.recipe.metrics,
        directory,
        world.rank,
        parts.total_steps,
        progress,
        Throughput(flops, peak and peak * world.world_size),
        lambda: peak_memory_bytes(device),
        _profiler(parts, directory, progress, flops),
        ranks.compare,
    )
    parts.step.phase = observer.phase
    return observer


def _profiler(
    parts: Assembled, directory: RunDirectory, progress: Progress, flops_per_token: float
) -> Profiler | None:
    """Return this rank's profiler, if the recipe wants one."""
    table, data, world = parts.recipe.profile, parts.recipe.data, parts.world
    ranks = [each for each in table.ranks if each < world.world_size]
    if table.steps and not ranks:
        progress.warn("profile.ranks names no rank of this run: nothing is profiled")
    if not table.steps or world.rank not in ranks:
        return None
    from ..observe.profiler import Profiler, Setting

    share = data.global_batch * data.seq_len / world.world_size
    folder, main = directory.path / "profiles", world.rank == min(ranks)
    return Profiler(table, Setting(folder, world.rank, main, parts.device, flops_per_token * share))
