"""The source of the interpreter's own standard library, which every machine has."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Literal

from xxhash import xxh3_128_hexdigest

from ..core.config import CountOrZero
from ..core.errors import DataError
from .configs import DocumentSource, sources
from .documents import Document

# Installed packages, tests full of deliberately odd text, and a module that differs by machine.
PYTHON_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PYTHON_LEFT_OUT_PREFIX = "_sysconfigdata"


@sources.register
class PythonSource(DocumentSource):
    """The interpreter's own standard library, one document a file: text every machine has."""

    name: Literal["python"] = "python"
    max_bytes: CountOrZero = 0
    """stop after this many bytes of text; 0 takes all"""

    def documents(self) -> Iterator[Document]:
        """Yield the library's modules, in a fixed scattered order."""
        total = 0
        for path, status in list_library_modules():
            total += status.st_size
            if self.max_bytes and total > self.max_bytes:
                return
            with suppress(OSError, UnicodeDecodeError):  # the user chose no file and can mend none
                yield Path(path).read_text(encoding="utf-8")

    def fingerprint(self) -> str:
        """Return the interpreter's version and the files' sizes and times."""
        states = [
            (path, status.st_size, status.st_mtime_ns) for path, status in list_library_modules()
        ]
        hashed = xxh3_128_hexdigest(repr(states).encode())
        return f"python {platform.python_version()} {self.max_bytes} {hashed}"


def list_library_modules() -> list[tuple[str, os.stat_result]]:
    """Return the path and status of each module of the standard library, in a fixed random order.

    The order follows a hash of the path within the library, so that any run of modules, such as the
    held-out tail, is a random sample.

    Raises:
        DataError: the library is not in a folder.
    """
    root = sysconfig.get_path("stdlib")
    if not os.path.isdir(root):
        raise DataError(
            f"{root}: this interpreter's standard library is not there as files",
            'use another source, such as "text"',
        )
    modules: list[tuple[bytes, str, os.stat_result]] = []
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name in PYTHON_LEFT_OUT or entry.name.startswith(PYTHON_LEFT_OUT_PREFIX):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    inside = Path(entry.path).relative_to(root).as_posix()
                    modules.append((blake2b(inside.encode()).digest(), entry.path, entry.stat()))
    return [(path, status) for _, path, status in sorted(modules, key=itemgetter(0))]
