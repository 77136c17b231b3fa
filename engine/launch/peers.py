"""What ranks tell each other of signals: by votes, and by the job's store where they do not vote.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING

from ..core.errors import ExitCode, LostContact

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

TICK_SECONDS = 1.0
"""how often ranks look"""
ASKED, LEFT = "stop/asked", "stop/left"


def any_rank(flags: Sequence[bool], group: dist.ProcessGroup | None) -> list[bool]:
    """Return for each flag whether it is set on any rank: one small all-reduce.

    Args:
        flags: equally many on each rank.
        group: a gloo group, so that no GPU is waited for; None in one process.

    Raises:
        LostContact: another rank ended.
    """
    if group is None:
        return list(flags)
    import torch
    import torch.distributed as dist

    votes = torch.tensor(flags, dtype=torch.int32)
    try:
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise LostContact.by(group.rank(), error) from error
    return [bool(vote) for vote in votes.tolist()]


@dataclass(frozen=True)
class Peers:
    """The other ranks of a job. Where the store is gone, nothing is told and nothing is learned.

    Args:
        store: of the job.
        lingers: the store goes with this process.
    """

    store: Store
    lingers: bool

    def ask(self, reason: str) -> None:
        """Tell that a signal asked this rank to stop."""
        with suppress(RuntimeError):
            self.store.set(ASKED, reason)

    def is_asked(self) -> bool:
        """Return whether a rank was asked."""
        with suppress(RuntimeError):
            return self.store.check([ASKED])
        return False

    def leave(self, reason: str, code: ExitCode) -> None:
        """Tell that this rank ends at once, and give the others the time to see it."""
        with suppress(RuntimeError):
            self.store.set(LEFT, str(int(code)))
            self.store.set(ASKED, reason)
            if self.lingers:
                sleep(2 * TICK_SECONDS)

    def code_of_leaver(self) -> ExitCode | None:
        """Return the exit code of a rank that ended at once; None: none did."""
        with suppress(RuntimeError):
            if self.store.check([LEFT]):
                return ExitCode(int(self.store.get(LEFT)))
        return None
