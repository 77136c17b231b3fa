"""Memory and CPU time that a block of a test may take, whatever else the machine does."""

import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


@contextmanager
def limited(megabytes: int = 1024, cpu_seconds: float = 30) -> Iterator[None]:
    """Fail the block if this process takes more than that beside what it has.

    Memory that is refused raises MemoryError in Python, and ends other libraries in their ways.
    """

    def too_long(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"more than {cpu_seconds} CPU seconds")

    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGPROF, too_long)
    resource.setrlimit(resource.RLIMIT_DATA, (used + megabytes * 2**20, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGPROF, handler)
