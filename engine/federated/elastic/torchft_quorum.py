"""Finds the replica groups that are there by torchft's quorum, and connects this one to them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ....kernels.torch_private import TCPStore
from ...core.errors import EnvironmentFault, LostContact
from ...core.registry import require_package
from ...launch.ending import skip_teardown
from ...launch.group import RankPeers, open_listener
from .replica import Replica

LONGEST_WAIT = timedelta(days=1)
"""for a quorum, which waits for the slowest group's round; a signal ends the wait"""
QUORUM_RETRIES = 10_000
"""within that time, so that a lighthouse that is away for some seconds ends no run"""
CONNECT_SECONDS = 10.0
POLL_SECONDS = 0.02
PING_SECONDS = 30.0


def load_torchft() -> Any:
    """Return torchft.

    Raises:
        EnvironmentFault: it is not installed.
    """
    # It writes lines for each quorum otherwise; the variable is read when it is imported.
    os.environ.setdefault("RUST_LOG", "error")
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    return require_package("torchft", 'carrier = "elastic"', "ft")


class TorchftQuorum:
    """Connects this rank to the corresponding ranks of the other replica groups.

    torchft 0.2's Manager forms quorums at the end of rounds and reconfigures the process group;
    what heals is sent by this package, because torchft's own transports unpickle what arrives.

    Args:
        replica: the replica group.
        rank: number of this rank in its group.
        size: number of ranks of the group.
        group: a gloo group of these ranks, which nothing else uses; None: one rank.
        timeout_seconds: how long a collective waits for another group.
        report: shows a message to the user.

    Raises:
        EnvironmentFault: the lighthouse does not answer, or the name of this machine does not
            resolve.
    """

    def __init__(
        self,
        replica: Replica,
        rank: int,
        size: int,
        group: ProcessGroup | None,
        timeout_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        torchft = load_torchft()
        self._ranks, self._has_ranks = RankPeers(group), group is not None
        self._lighthouse, self._report = replica.lighthouse, report
        timeout = timedelta(seconds=timeout_seconds)
        host = find_host(replica.lighthouse) if rank == 0 else ""
        self._store = _serve_store(host, replica.lighthouse) if rank == 0 else None
        where = [(host, self._store.port if self._store else 0)]
        if group is not None:
            dist.broadcast_object_list(where, group=group, group_src=0)
        self._peers = torchft.ProcessGroupGloo(timeout=timeout)
        skip_teardown()  # threads of torchft would wait for a quorum at the end of the process
        ((host, port),) = where
        try:
            self._manager = torchft.Manager(
                pg=self._peers,
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,
                # torchft orders the groups of a quorum by these texts.
                replica_id=f"{replica.number:05d}",
                rank=rank,
                world_size=size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=replica.lighthouse,
                hostname=host,
                timeout=timeout,
                quorum_timeout=LONGEST_WAIT,
                connect_timeout=timedelta(seconds=CONNECT_SECONDS),
                checkpoint_transport=_NoTransport(),
                init_sync=False,
                quorum_retries=QUORUM_RETRIES,
            )
        except (RuntimeError, TimeoutError) as error:
            message = f"no lighthouse of torchft answers at {replica.lighthouse}: {error}"
            hint = "start it first: torchft_lighthouse --min_replicas 1"
            raise EnvironmentFault(message, hint) from error
        self._waiter = ThreadPoolExecutor(1, "quorum")

    @property
    def peers(self) -> ProcessGroup:
        """The ranks of the same place in all groups of the quorum, in the order of the groups."""
        peers: ProcessGroup = self._peers.parent
        return peers

    def all_ranks(self, flag: bool) -> bool:
        """Return whether a flag is set on all ranks of this group; all of them call it."""
        return not self._ranks.any(not flag) if self._has_ranks else flag

    def form(self, step: int, check: Callable[[], None]) -> bool:
        """Wait for the other groups, and connect to them.

        Args:
            step: finished optimizer steps, which torchft shows.
            check: called while this waits, by all ranks together; what it raises ends the wait.

        Returns:
            whether this rank is connected to the others.

        Raises:
            LostContact: the lighthouse does not answer.
        """
        self._manager.load_state_dict({"step": step, "batches_committed": 0})
        self._manager.start_quorum(allow_heal=False)
        formed: Future[None] = self._waiter.submit(self._manager.wait_quorum)
        asked_at = monotonic()
        while not self.all_ranks(_is_done(formed)):
            check()
            if self._store and monotonic() - asked_at > PING_SECONDS:
                self._ping()
                asked_at = monotonic()
        if error := formed.exception():
            message = f"the lighthouse at {self._lighthouse} does not answer: {error}"
            raise LostContact(message, "start it again, and run this again to resume") from error
        return self._manager.errored() is None

    def _ping(self) -> None:
        """Tell the user if the lighthouse is away: torchft asks it again and again, in silence."""
        address = urlsplit(self._lighthouse)
        try:
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), 1.0).close()
        except OSError as error:
            self._report(f"waiting for the lighthouse at {self._lighthouse}: {error}")

    def commit(self) -> bool:
        """Return whether all ranks of this group have what they need; all of them call this."""
        committed: bool = self._manager.should_commit()
        return committed

    def fail(self, error: Exception) -> None:
        """Leave the other groups, so that the next quorum connects them anew."""
        self._manager.report_error(error)
        self._peers.abort()  # else groups that wait for this one would wait until they time out
        self._manager.should_commit()

    def close(self) -> None:
        """Leave the federation."""
        self._manager.shutdown(wait=False)
        self._waiter.shutdown(wait=False)


class _NoTransport:
    """Takes the place of torchft's transport, which would serve pickled state to whoever asks."""

    def metadata(self) -> str:
        return ""

    def disallow_checkpoint(self) -> None:
        pass

    def shutdown(self, wait: bool = True) -> None:
        pass


def _is_done(future: Future[None]) -> bool:
    """Return whether a future is done, after a short wait for it."""
    try:
        future.exception(POLL_SECONDS)
    except TimeoutError:
        return False
    return True


def find_host(lighthouse: str) -> str:
    """Return the name or address under which other groups reach this machine.

    Raises:
        EnvironmentFault: its name does not resolve.
    """
    address = urlsplit(lighthouse).hostname or ""
    if _is_loopback(lighthouse):  # then all groups are on this machine
        return address
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        message = f"the name of this machine, {name}, does not resolve: {error}"
        hint = "other replica groups connect to it: add it to /etc/hosts or the name server"
        raise EnvironmentFault(message, hint) from error
    return name


def _is_loopback(lighthouse: str) -> bool:
    host = urlsplit(lighthouse).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _serve_store(host: str, lighthouse: str) -> TCPStore:
    """Return a store that this process serves, where the ranks of a quorum find one another."""
    listener = open_listener(host, 0, has_other_nodes=not _is_loopback(lighthouse))
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
