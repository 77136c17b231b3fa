"""Watch a run on each rank: its log, heartbeat, metrics and profile, and why it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from ..assemble.assemble import Assembled
from ..core.errors import LostContact
from ..core.heartbeat import first_failure, heartbeat, read_beats
from ..core.run_dir import RunDirectory
from ..core.run_state import record_early_failure, record_failure
from ..launch.environment import World, flight_recorder
from ..launch.rank_log import open_rank_log
from ..launch.watchdog import Watchdog
from ..lora.sizes import flops_per_token
from ..observe.observer import Observer
from ..observe.progress import Progress
from ..observe.throughput import SlowRanks, Throughput, device_peak_flops, peak_memory_bytes
from ..precision.hardware import dtype_name
from .row_flops import RowFlops

if TYPE_CHECKING:
    from ..observe.profiler import Profiler


@contextmanager
def watch_rank(directory: RunDirectory, world: World, limit_seconds: float) -> Iterator[None]:
    """Keep this rank's log and heartbeat around a run; rank 0 locks the run directory first.

    Args:
        directory: the run directory.
        world: this process's place among the ranks.
        limit_seconds: the time after which a rank without progress is taken to hang.

    Raises:
        RunInUse: another run has the directory.
        EnvironmentFault: nothing can be written to the directory.
    """
    with ExitStack() as stack:
        log = stack.enter_context(open_rank_log(directory.logs, world.rank))
        fail = None
        if world.rank == 0:
            stack.enter_context(directory)
            stack.enter_context(record_early_failure(directory.path))
            fail = partial(record_failure, directory.path)
        stack.enter_context(Watchdog(log, world, limit_seconds, fail))
        stack.enter_context(flight_recorder(directory.logs))
        heartbeat.enter("rendezvous")
        try:
            yield
        except LostContact as error:
            beats = [b for b in read_beats(directory.logs) if b.rank < world.world_size]
            if failed := first_failure(beats):
                error.hint = f"rank {failed.rank} failed first, {failed.where}: {failed.reason}"
            raise


def open_observer(
    parts: Assembled,
    directory: RunDirectory,
    progress: Progress,
    group: ProcessGroup | None,
    first_batch: int,
) -> Observer:
    """Build the observer of the run on this rank.

    Args:
        parts: the parts of the run.
        directory: the run directory, for metrics.jsonl and profiles/.
        progress: prints lines and the progress bar.
        group: a gloo group of all ranks, which compares them; None in one process.
        first_batch: the global batch from which training starts.
    """
    world, device = parts.world, parts.device
    peak = device_peak_flops(device, dtype_name(parts.model.compute_dtype))
    task = parts.step.task
    recipe, row_flops = parts.recipe, None
    has_lengths = recipe.data.packing == "ragged" or recipe.data.pad_to
    if has_lengths and recipe.task.needs_language_model:
        row_flops = RowFlops(parts, group)
    copies_alone = parts.degrees.world == parts.degrees.replicate
    ranks = SlowRanks(group, progress.warn, local_forward=copies_alone)

    def compare_ranks(step: int) -> dict[str, float]:
        if row_flops:
            row_flops.sum_over_ranks()
        return ranks.compare(step)

    return Observer(
        parts.recipe.metrics,
        directory,
        group.rank() if group else 0,
        parts.total_steps,
        progress,
        Throughput(
            task.unit,
            parts.loader.describe_position,
            partial(_flops_per_unit, parts),
            peak and peak * world.world_size,
            row_flops=row_flops.take if row_flops else None,
        ),
        lambda: peak_memory_bytes(device),
        parts.phases,
        _profiler(parts, directory, progress, row_flops, first_batch),
        compare_ranks,
        row_flops.add if row_flops else lambda batches: None,
    )


def _flops_per_unit(parts: Assembled, batches: int) -> float:
    """Return the FLOPs of a unit of the task, in the split of the last of these global batches."""
    split, _ = parts.data.locate(batches - 1)
    table, task = parts.data.turns[split].table, parts.step.task
    per_token = flops_per_token(parts.model, parts.model_config, table.seq_len)
    return replace(task, data=table).flops_per_unit(per_token)


def _profiler(
    parts: Assembled,
    directory: RunDirectory,
    progress: Progress,
    row_flops: RowFlops | None,
    first_batch: int,
) -> Profiler | None:
    """Return this rank's profiler, if the recipe wants one."""
    table, world = parts.recipe.profile, parts.world
    split, _ = parts.data.locate(first_batch + table.start)
    data = parts.data.turns[split].table
    positions = data.global_batch * parts.recipe.task.positions(data)
    per_token = flops_per_token(parts.model, parts.model_config, data.seq_len)
    ranks = [each for each in table.ranks if each < world.world_size]
    if table.steps and not ranks:
        progress.warn("profile.ranks names no rank of this run: nothing is profiled")
    if not table.steps or world.rank not in ranks:
        return None
    flops = per_token * positions / world.world_size
    return table.build(
        parts.phases,
        directory.path / "profiles",
        rank=world.rank,
        is_main=world.rank == min(ranks),
        device=parts.device,
        flops_per_step=lambda: row_flops.mean_step if row_flops else flops,
    )
