"""Names for the parts of a step, for a profiler; they cost nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Phase = Callable[[str], AbstractContextManager[None]]
"""name -> a context around that part of the step"""

_NOTHING = nullcontext()


def no_phase(_name: str) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return _NOTHING
