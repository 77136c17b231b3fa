"""A process of its own that stays: it calls top-level test functions one after another.

Triton decides once, when it is imported, whether kernels are interpreted; so what needs the
interpreter, and what must not have it, each run in a process of their own.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = os.environ.get("TRAINER_REQUIRE_TRITON") == "1"

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None and not REQUIRED, reason="triton is not installed"
)


class Child:
    """A child process; it starts at the first call, and anew after it died."""

    def __init__(
        self, env: dict[str, str], prepare: Callable[..., Any], *, path: str | None = None
    ) -> None:
        """Set what the child has that we do not.

        Args:
            env: its variables, beside ours.
            prepare: a top-level function that it calls first.
            path: a folder whose packages come before all others.
        """
        self.env = env
        self.prepare = prepare
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return what `function(*args)` returns in the child.

        Raises:
            AssertionError: it raised there (the text is its traceback), or the child died.
        """
        if self.process is None:
            self._start()
            self._exchange(self.prepare)
        return self._exchange(function, *args)

    def stop(self) -> None:
        """End the child, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        folders = [self.path, str(ROOT), str(ROOT / ".dev"), os.environ.get("PYTHONPATH")]
        env = {**os.environ, **self.env, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name if __spec__ else __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
        )

    def _exchange(self, function: Callable[..., Any], *args: Any) -> Any:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            request = (function.__module__, function.__qualname__, args)
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            value, error = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError):
            code = self.process.wait()
            self.process = None
            raise AssertionError(f"the child died with exit code {code}") from None
        except BaseException:  # a test that ran out of time leaves an answer nobody waits for
            self.stop()
            raise
        if error:
            raise AssertionError(f"in the child:\n{error}")
        return value


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Call what is asked for until there is nobody to ask."""
    while True:
        try:
            module, name, args = pickle.load(requests)
        except EOFError:
            return
        value, error = None, ""
        try:
            value = getattr(import_module(module), name)(*args)
        except BaseException:
            error = traceback.format_exc()
        answers.write(pickle.dumps((value, error)))
        answers.flush()


if __name__ == "__main__":
    ours = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a kernel prints is no answer
    serve(sys.stdin.buffer, ours)
