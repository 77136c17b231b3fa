"""Which clients' state this process keeps, and how it reaches the ranks of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from ...core.errors import LostContact
from ...launch.job_group import create_subgroup
from .exchange import gather_values


@dataclass(frozen=True)
class ClientRanks:
    """The clients of this rank.

    Attributes:
        number: number of the client whose rank this is; None: all clients train here in turn.
        peers: gloo group of the ranks that have the same place in each client, in the order of
            clients: they hold the same shards. None: all clients train here, or each in a job of
            its own.
    """

    number: int | None = None
    peers: ProcessGroup | None = None

    def owns(self, client: int) -> bool:
        """Return whether this rank keeps the state of a client."""
        return self.number is None or self.number == client

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all clients, in the order of their numbers; as in JSON.

        Without peers it is this rank's value alone.

        Raises:
            LostContact: a rank was lost.
        """
        if self.peers is None:
            return [value]
        try:
            return gather_values(self.peers, value)
        except RuntimeError as error:  # gloo's word for a peer that is gone
            raise LostContact.by(self.peers.rank(), error) from error


def divide_job(job: ProcessGroup, clients: int, timeout_seconds: float) -> ClientRanks:
    """Return the client of this rank, of a job whose clients have equally many consecutive ranks.

    Args:
        job: the group of all ranks, as `create_job_group` returns it.
        clients: number of clients.
        timeout_seconds: how long a collective waits for the other clients.
    """
    size = job.size() // clients
    number, place = divmod(job.rank(), size)
    ranks = range(place, job.size(), size)
    return ClientRanks(number, create_subgroup(job, f"peers{place}", ranks, timeout_seconds))
