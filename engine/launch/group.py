"""Where the ranks of a job meet, and how they part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from ..core.errors import EnvironmentFault, LostContact
from . import ending
from .environment import World
from .listen import open_listener
from .peers import Peers
from .signals import StopFlag

PARTING_SECONDS = 60.0


@contextmanager
def process_group(
    world: World, device: torch.device, timeout_seconds: float, stop: StopFlag | None = None
) -> Iterator[dist.ProcessGroup | None]:
    """Join the other ranks; yield a gloo group of all for flags and files, None for one process.

    The default group is NCCL on GPUs and gloo on CPUs. Each attempt of a restarted job meets under
    its own names: a dead attempt's addresses would be tried otherwise (pytorch#135712).

    Args:
        world: who meets where.
        device: of this rank.
        timeout_seconds: how long a collective waits for the other ranks.
        stop: shall know of signals to the other ranks.

    Raises:
        EnvironmentFault: they could not meet.
        LostContact: another rank was lost.
    """
    if world.world_size == 1:
        yield None
        return
    timeout = timedelta(seconds=timeout_seconds)
    on_gpu = device.type == "cuda"
    if dist.is_initialized():  # who joined the ranks also parts them
        yield dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD
        return
    try:
        store = _store(world, timeout)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        host = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD
    except (OSError, RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {world.rank} of {world.world_size} could not meet the others at "
            f"{world.meeting_point}: {str(error).splitlines()[0]}",
            "check that all ranks run, and that this address and port are free and reachable",
        ) from error
    ending.skip_teardown()
    if stop:
        serves = world.rank == 0 and not world.hosted and "tcp://" in world.meeting_point
        stop.meet(Peers(store, lingers=serves))
    try:
        yield host
        # A rank that leaves early breaks the last collective of the others. After an error there
        # is nothing to wait for: the process ends, and the launcher ends the others.
        dist.monitored_barrier(host, timedelta(seconds=min(timeout_seconds, PARTING_SECONDS)))
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        raise LostContact.by(world.rank, error) from error
    dist.destroy_process_group()


def _store(world: World, timeout: timedelta) -> Store:
    store: Store
    if world.meeting_point.startswith("tcp://"):
        address = urlsplit(world.meeting_point)
        assert address.hostname, "find_world gives a host and a port"
        host, port = address.hostname, address.port or 0
        listener = None
        if world.rank == 0 and not world.hosted:
            # By itself the store would listen at all addresses of this machine.
            several = world.local_world_size < world.world_size
            listener = open_listener(host, port, has_other_nodes=several).detach()
        store = TCPStore(
            host,
            port,
            world.world_size,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    else:
        store = FileStore(world.meeting_point, world.world_size)
        store.set_timeout(timeout)
    return PrefixStore(f"trainer/attempt{world.attempt}", store)


def group_of_its_own(world: World, timeout_seconds: float) -> dist.ProcessGroup | None:
    """Return a gloo group for saves in the background, which must not meet other collectives."""
    if world.world_size == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=timeout_seconds)
    )
    return group
