"""What each command says of itself, for `trainer docs` and its page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..engine.recipe.documents.pages import markdown_table, page, plain
from .main import COMMANDS, import_command


@dataclass(frozen=True)
class CommandHelp:
    """A command or a sub-command, and what it takes."""

    name: str
    """such as `checkpoint list`"""
    usage: str
    summary: str
    options: list[tuple[str, str]]
    """each argument and option, with its help"""


def commands() -> list[CommandHelp]:
    """Return every command with its sub-commands, in the order of `trainer --help`."""
    return [each for name in COMMANDS for each in command_help(name)]


def command_help(name: str) -> Iterator[CommandHelp]:
    """Yield a command of `COMMANDS` and its sub-commands."""
    yield from _describe(name, import_command(name))


def commands_page() -> str:
    """Return all commands as a Markdown page."""
    parts = []
    for command in commands():
        level = "###" if " " in command.name else "##"
        rows = [(f"`{option}`", plain(text)) for option, text in command.options]
        parts += [
            f"{level} trainer {command.name}",
            plain(command.summary),
            f"```text\n{command.usage}\n```",
            markdown_table(("argument or option", "what it is"), rows) if rows else "",
        ]
    introduction = (
        "Every command also takes `--help`. Before the command may stand `--traceback`, which "
        "shows where in the code an error comes from. What commands end with is in "
        "[Exit codes](exit-codes.md)."
    )
    return page("Commands", introduction, *parts)


def _describe(name: str, command: Any) -> Iterator[CommandHelp]:
    context = command.make_context(f"trainer {name}", [], resilient_parsing=True)
    # Each command's own --help is everywhere the same.
    records = [each.get_help_record(context) for each in command.params if each.name != "help"]
    yield CommandHelp(
        name,
        " ".join(["trainer", name, *command.collect_usage_pieces(context)]),
        " ".join((command.help or "").split()),
        [record for record in records if record],
    )
    for word, inner in getattr(command, "commands", {}).items():
        yield from _describe(f"{name} {word}", inner)
