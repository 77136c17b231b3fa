"""Tells ids of models on the Hugging Face hub from paths. Torch-free, without the hub's library."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple, Self

_ID = re.compile(
    r"(?!.*\.\.)(?![^@]*--)"  # no name on the hub has these
    r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(\w[\w./-]{0,199}))?",
    re.ASCII,
)
_FILE = re.compile(
    r"\.(json|jsonl|toml|ya?ml|safetensors|bin|pth?|ckpt|gguf|model|tiktoken|txt|zip|tar|gz|html)$"
)
OUR_FOLDERS = frozenset({"assets", "checkpoints", "data", "recipes", "runs"})
"""first parts of a path that are never taken for an organisation of the hub"""


class HubId(NamedTuple):
    """A model on the hub.

    Attributes:
        repo: the organisation or user and the name, such as "Qwen/Qwen3-0.6B".
        revision: a commit, tag or branch; "" for the newest commit.
    """

    repo: str
    revision: str = ""

    def pin(self, commit: str) -> Self:
        """Return the id of one commit."""
        return self._replace(revision=commit)

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(re.fullmatch(r"[0-9a-f]{40}", self.revision))

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def read_hub_id(text: str) -> HubId | None:
    """Return the id that a text is, whatever paths exist; None: it has not the form of one."""
    found = _ID.fullmatch(text)
    return HubId(found[1], found[2] or "") if found else None


def parse_hub_id(text: str | Path, folder: Path | None = None) -> HubId | None:
    """Return the id that a text such as `Qwen/Qwen3-0.6B@main` is, or None for a path.

    A path that exists is a path, and so is what begins with `.`, `/` or `~`, has a file's suffix,
    or begins with a folder that exists.

    Args:
        text: an id or a path.
        folder: where a relative path starts; None is the working directory.
    """
    text = os.fspath(text)
    found = read_hub_id(text)
    if not found or _FILE.search(found.repo):
        return None
    first, here = text.partition("/")[0], folder or Path()
    if first in OUR_FOLDERS or os.path.lexists(here / text) or (here / first).is_dir():
        return None
    return found
