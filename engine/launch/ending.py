"""The end of a process. Torch-free."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

SHOW_CURSOR = b"\x1b[?25h\n"
_skips_teardown = False


def skip_teardown() -> None:
    """Make `end_process` leave without the interpreter's teardown.

    A process group's threads may ask for the interpreter's lock once more after the last
    collective. If the teardown has begun by then, the process aborts: seen in 2 of 96 ends of
    ranks with torch 2.13 and gloo, after all work was done.
    """
    global _skips_teardown
    _skips_teardown = True


def end_process(code: int) -> NoReturn:
    """End with an exit code; handlers registered with `atexit` run in any case."""
    if not _skips_teardown:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_abruptly(code: int) -> NoReturn:
    """End without cleaning up. Children of ours end with this process (Linux), or here."""
    processes = sys.modules.get("multiprocessing")
    for process in processes.active_children() if processes else ():
        process.kill()
    if os.isatty(1):
        os.write(1, SHOW_CURSOR)
    os._exit(code)
