"""The files of this repository, as a clone has them."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

import trainer

ROOT = Path(trainer.__file__).resolve().parent
PACKAGES = ("cli", "engine", "kernels", "model_zoo")


@cache
def files() -> list[Path]:
    """Return every file that git tracks or would track; without git, every file of ours."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        found = [ROOT / name for name in done.stdout.splitlines()]
    else:
        found = [
            path for part in (*PACKAGES, "tests", "recipes") for path in (ROOT / part).rglob("*")
        ]
    return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)


def modules(*folders: str) -> list[Path]:
    """Return the Python files below some top folders."""
    return [
        path
        for path in files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders
    ]


@cache
def tree(path: Path) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(path.read_text("utf-8"))


def name(path: Path) -> str:
    """Return a file's path from the root."""
    return path.relative_to(ROOT).as_posix()
