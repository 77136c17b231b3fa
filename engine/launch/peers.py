"""What ranks tell each other of signals where they do not meet in collectives: by the job's store.

Torch-free.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING

from ..errors import ExitCode

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

TICK_SECONDS = 1.0
"""how often ranks look"""
ASKED, LEFT = "stop/asked", "stop/left"


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
