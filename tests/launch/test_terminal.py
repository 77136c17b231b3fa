"""A debugger in a rank, on the terminal of the launcher."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

from .test_local import PARENT, PRELUDE, ROOT


def test_a_breakpoint_of_rank_0_talks_to_the_terminal_of_the_launcher(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    code = (
        PRELUDE + "answer = rank\nif not rank:\n    breakpoint()\nready()\nsys.exit(answer - rank)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, "2", "20", "0", str(tmp_path), code, "mark"],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".dev")},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    seen = b""
    while b"(Pdb)" not in seen:
        seen += os.read(master, 1000)
    os.write(master, b"answer = 5\ncontinue\n")
    try:
        assert process.wait(60) == 5, seen
    finally:
        process.kill()
        os.close(master)
