"""How often a job that failed is started again. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Restarts:
    """How often a job is started again, counted since its last progress.

    Args:
        limit: how many restarts without progress are allowed.
        newest_step: returns the step of the newest complete checkpoint, None if there is none.
        resume_arguments: added to the command once the job has saved a checkpoint, so that it
            resumes from that whatever the recipe says.

    Attributes:
        count: restarts since the last progress.
    """

    def __init__(
        self,
        limit: int,
        newest_step: Callable[[], int | None] = lambda: None,
        resume_arguments: Sequence[str] = (),
    ) -> None:
        self.limit = limit
        self.count = 0
        self._newest_step = newest_step
        self._resume_arguments = resume_arguments
        self._step = newest_step()
        self._has_saved = False

    def arguments(self) -> list[str]:
        """Return what to add to the command of the next attempt."""
        return list(self._resume_arguments) if self._has_saved else []

    def allow(self) -> bool:
        """Return whether a job that just failed may be started again, and count that."""
        step = self._newest_step()
        if step != self._step:
            self._step, self._has_saved, self.count = step, True, 0
        if self.count >= self.limit:
            return False
        self.count += 1
        return True
