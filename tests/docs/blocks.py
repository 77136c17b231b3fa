"""Reads the fenced blocks of a Markdown document.

The word after the fence says what a block is, and further words what to do with it:

    ```console           lines after `$ ` are commands, the others what they print
    ```console exit=2    each command ends with this exit code
    ```console varies    what is printed differs from run to run, not only in its numbers
    ```sh                commands alone
    ```sh no-run         commands that a test cannot run: only their options are checked
    ```toml NAME.toml    a recipe, kept under this name for the commands that follow
    ```toml              part of a recipe
    ```toml invalid      not checked here, but by the command that shows its mistakes
    ```python NAME.py    a module, kept under this name and run (not run: `python NAME.py no-run`)
    ```jsonl NAME.jsonl  a file, kept under this name; also `json`, `jinja` and `text`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w+)? ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    place: str
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def file_name(self) -> str:
        """The name to keep it under, or an empty string."""
        return next((word for word in self.words if re.search(r"^[^=]*\.\w+$", word)), "")

    @property
    def exit_code(self) -> int:
        """What its commands end with."""
        return next((int(word[5:]) for word in self.words if word.startswith("exit=")), 0)

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return each command with the lines that it is said to print."""
        if self.language == "sh":
            lines = re.sub(r"\\\n\s*", " ", self.text).splitlines()
            return [(line, []) for line in lines if line and not line.startswith("#")]
        found: list[tuple[str, list[str]]] = []
        if self.language != "console":
            return found
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


def blocks(document: Path) -> list[Block]:
    """Return the document's blocks in their order."""
    text = document.read_text("utf-8")
    return [
        Block(
            f"{document.name}:{text.count(chr(10), 0, match.start()) + 1}",
            match[1] or "",
            tuple(match[2].split()),
            match[3],
        )
        for match in FENCE.finditer(text)
    ]


def shape(line: str) -> str:
    """Return a line without what differs from run to run and from machine to machine."""
    line = re.sub(r"^compute in .*", "compute in", line)
    line = re.sub(r" mfu +[\d.]+%", "", line)
    line = re.sub(r"\d[\d.,:e+-]*", "#", line)
    return " ".join(line.split())
