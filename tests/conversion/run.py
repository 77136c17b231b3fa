"""Conversions as the command line makes them, in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trainer.cli.main import _run


class Bomb:
    """What makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def convert(*words: Any) -> int:
    """Return the exit code of `trainer convert-ckpt WORDS`."""
    return int(_run(["convert-ckpt", *map(str, words)]))


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: Any) -> str:
    """Return what a conversion that must fail says, after seeing that it left nothing behind."""
    before = _names(Path(words[2]).parent)
    capsys.readouterr()
    assert convert(*words) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "unexpected" not in said
    assert "error:" in said
    assert _names(Path(words[2]).parent) == before
    return said


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
