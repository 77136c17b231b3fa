"""What surrounds a run on each rank, so that every end of it leaves an explanation. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from ..core.errors import LostContact
from ..core.heartbeat import first_failure, heartbeat, read_beats
from ..core.run_dir import RunDirectory
from ..core.run_state import record_early_failure, record_failure
from ..launch.environment import World, flight_recorder
from ..launch.rank_log import open_rank_log
from ..launch.watchdog import Watchdog


@contextmanager
def watched(directory: RunDirectory, world: World, limit_seconds: float) -> Iterator[None]:
    """Keep this rank's log and heartbeat around a run; rank 0 locks the run directory first.

    Args:
        limit_seconds: a rank without progress for so long hangs.

    Raises:
        RunInUse: another run has the directory.
        EnvironmentFault: nothing can be written there.
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
