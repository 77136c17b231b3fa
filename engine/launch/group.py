"""The device of a rank, and the process groups of a job: how they are made and destroyed."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from time import sleep
from typing import Any, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from ...kernels.torch_private import FileStore, PrefixStore, Store, TCPStore
from ..core.errors import EnvironmentFault, ExitCode, LostContact
from .assembler import set_assembler
from .ending import TICK_SECONDS, skip_teardown
from .environment import World
from .freed_memory import keep_freed_memory
from .job_group import create_job_group, create_subgroup


def pick_device(world: World) -> torch.device:
    """Return the GPU of this process, or the CPU of a machine without GPUs.

    One process takes Apple's GPU (MPS), unless the environment has TRAINER_DEVICE=cpu. Several take
    the CPU there, because gloo, the only backend, does not communicate tensors of MPS.

    Raises:
        EnvironmentFault: this machine has more processes than GPUs.
    """
    if not torch.cuda.is_available():
        keep_freed_memory()
        return torch.device("mps" if world.world_size == 1 and takes_mps() else "cpu")
    visible = torch.cuda.device_count()
    # A scheduler that shows each task its own GPU alone calls it number 0.
    number = 0 if visible == 1 and world.launcher == "slurm" else world.local_rank
    if number >= visible:
        raise EnvironmentFault(
            f"local rank {number} has no GPU: this machine has {visible}",
            "start at most one process a GPU",
        )
    torch.cuda.set_device(number)
    # Only now, because reading the capability opens a context on the current device.
    set_assembler(torch.cuda.get_device_capability(number), torch.version.cuda)
    return torch.device("cuda", number)


def takes_mps() -> bool:
    """Return whether a process of its own computes on Apple's GPU."""
    return torch.backends.mps.is_available() and os.environ.get("TRAINER_DEVICE") != "cpu"


ASKED, LEFT = "stop/asked", "stop/left"
"""keys of the job's store: the signal that a rank got, and the exit code of one that left"""
TEARDOWN_SECONDS = 60.0
"""how long the ranks wait for each other at the end"""


@contextmanager
def process_group(
    world: World,
    device: torch.device,
    timeout_seconds: float,
    on_join: Callable[[RankPeers], None] = lambda peers: None,
    parts: int = 1,
) -> Iterator[dist.ProcessGroup | None]:
    """Create the default process group, and destroy it at the end of the context.

    The default group is NCCL on GPUs and gloo on CPUs; one process has none.

    Args:
        world: the place of this process among the ranks.
        device: the device of this rank.
        timeout_seconds: how long a collective waits for the other ranks.
        on_join: called with the other ranks once the group exists.
        parts: number of parts of the job, each with a default group of its own.

    Yields:
        a gloo group of all ranks, for flags and files; None for one process.

    Raises:
        EnvironmentFault: the group could not be created.
        LostContact: another rank was lost.
    """
    if world.world_size == 1:
        yield None
        return
    timeout = timedelta(seconds=timeout_seconds)
    on_gpu = device.type == "cuda"
    if dist.is_initialized():  # by a caller, who also destroys the group
        host = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD
        on_join(RankPeers(host))
        yield host
        return
    try:
        store = _store(world, timeout)
        own = world.divide(parts)
        part = f"part{world.rank // own.world_size}"
        if own.world_size > 1:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=PrefixStore(part, store) if parts > 1 else store,
                rank=own.rank,
                world_size=own.world_size,
                timeout=timeout,
                # With a device NCCL connects here; without, in the first collective of training.
                device_id=device if on_gpu else None,
            )
        if parts > 1:
            whole = PrefixStore("job", store)
            host = create_job_group(whole, world.rank, world.world_size, timeout_seconds)
        else:
            host = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD
    except (OSError, RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {world.rank} of {world.world_size} could not join the process group at "
            f"{world.rendezvous}: {str(error).splitlines()[0]}",
            "check that all ranks run, and that this address and port are free and reachable",
        ) from error
    # The process group has threads from here on: `skip_teardown` says what they do at the end.
    skip_teardown()
    serves_store = (
        world.rank == 0 and not world.launcher_serves_store and "tcp://" in world.rendezvous
    )
    on_join(RankPeers(host, store, serves_store))
    try:
        yield host
        # A rank that leaves early breaks the last collective of the others. After an error no
        # rank waits: this process ends, and the launcher ends the others.
        limit = timedelta(seconds=min(timeout_seconds, TEARDOWN_SECONDS))
        cast("Any", host).monitored_barrier(limit)  # torch's stubs lack it
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors, which only the source file in their text tells apart.
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        raise LostContact.by(world.rank, error) from error
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class RankPeers:
    """The other ranks of a job, reached by an all-reduce, or by the job's store at other times.

    Calls do nothing where the store is gone.

    Args:
        group: a gloo group of all ranks, so that no GPU is waited for.
        store: the store of the job, if this process has opened it.
        serves_store: whether the store ends with this process.
    """

    group: dist.ProcessGroup | None
    store: Store | None = None
    serves_store: bool = False

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank: one small all-reduce.

        Raises:
            LostContact: another rank ended.
        """
        # On the CPU, as the group is gloo: an all-reduce by NCCL would wait for the queued kernels.
        votes = torch.tensor([flag], dtype=torch.int32)
        try:
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            rank = self.group.rank() if self.group else 0
            raise LostContact.by(rank, error) from error
        return bool(votes.item())

    def ask(self, reason: str) -> None:
        """Tell the other ranks that a signal asked this one to stop."""
        with suppress(RuntimeError):
            if self.store:
                self.store.set(ASKED, reason)

    def is_asked(self) -> bool:
        """Return whether a rank was asked to stop."""
        with suppress(RuntimeError):
            return self.store is not None and self.store.check([ASKED])
        return False

    def leave(self, reason: str, code: ExitCode) -> None:
        """Tell the other ranks that this one ends at once, and give them time to see it."""
        with suppress(RuntimeError):
            if self.store:
                # The code before the request: a rank that sees ASKED may look for the code at once.
                self.store.set(LEFT, str(int(code)))
                self.store.set(ASKED, reason)
            if self.serves_store:
                # The store ends with this process, and the others look at it once a tick.
                sleep(2 * TICK_SECONDS)

    def code_of_leaver(self) -> ExitCode | None:
        """Return the exit code of a rank that ended at once, or None if no rank did."""
        with suppress(RuntimeError):
            if self.store and self.store.check([LEFT]):
                return ExitCode(int(self.store.get(LEFT)))
        return None


def _store(world: World, timeout: timedelta) -> Store:
    store: Store
    if world.rendezvous.startswith("tcp://"):
        address = urlsplit(world.rendezvous)
        assert address.hostname, "find_world gives a host and a port"
        host, port = address.hostname, address.port or 0
        listener = None
        if world.rank == 0 and not world.launcher_serves_store:
            # Without a socket of ours the store would listen at all addresses of this machine.
            several = world.local_world_size < world.world_size
            listener = open_listener(host, port, has_other_nodes=several).detach()
        store = TCPStore(
            host,
            port,
            world.world_size,
            is_master=listener is not None,
            timeout=timeout,
            # `init_process_group` waits for all ranks itself.
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    else:
        store = FileStore(world.rendezvous, world.world_size)
        store.set_timeout(timeout)
    # A restarted job must not read the addresses of a dead attempt (pytorch#135712).
    return PrefixStore(f"trainer/attempt{world.attempt}", store)


def create_checkpoint_group(
    world: World, timeout_seconds: float, job: dist.ProcessGroup | None = None
) -> dist.ProcessGroup | None:
    """Create a gloo group for saves in the background, apart from the collectives of training.

    Args:
        world: the place of this process among the ranks.
        timeout_seconds: how long a collective waits for the other ranks.
        job: a group of all ranks, if the default group has only a part of them.
    """
    if world.world_size == 1:
        return None
    if job is not None:
        return create_subgroup(job, "checkpoint", range(world.world_size), timeout_seconds)
    group: dist.ProcessGroup = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=timeout_seconds)
    )
    return group


def open_listener(host: str, port: int, *, has_other_nodes: bool) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    It listens at all addresses if the given one cannot be used: this machine does not have it (a
    Kubernetes service, a translated address), or it is a loopback address (Debian's for its own
    name) while ranks on other machines connect.

    Args:
        host: name or address of this machine that the ranks were given.
        port: a free port.
        has_other_nodes: whether ranks on other machines connect.

    Raises:
        OSError: the port is in use, or the host has no address.
    """
    for family, _, _, _, (address, *_) in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        is_loopback = ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
        if has_other_nodes and is_loopback:
            continue
        try:
            return socket.create_server(
                (str(address), port),
                family=family,
                backlog=socket.SOMAXCONN,
                dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(
        ("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=has_both
    )
