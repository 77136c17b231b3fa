"""`trainer docs`: the help of a key, a component, a table, a command or an exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.core.errors import ExitCode, RecipeError
from ..engine.core.files import write_asked
from ..engine.recipe.documents.describe import Key
from ..engine.recipe.documents.pages import markdown_table, page, plain, recipe_pages
from ..engine.recipe.documents.reference import (
    Section,
    components,
    keys_called,
    nearest_known,
    tables,
    tables_called,
)
from ..engine.recipe.documents.starter import shipped_recipes
from ..engine.recipe.schema import REGISTRIES
from .complete import complete_word
from .main import COMMANDS, import_command
from .options import AsJson
from .table import print_table, table_text

EXIT_CODES = "exit-codes"


def docs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD",
            autocompletion=complete_word,
            help="such as optimizer.lr, adamw, data, checkpoint list, quickstart, or 75",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write the whole reference as Markdown")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the help of a key, a component, a table, a command or an exit code."""
    # As a recipe writes a table, and a shell a command.
    word = " ".join(words or []).removeprefix("trainer ").strip("[] ")
    if write:
        _write(write)
    elif word:
        _print_help(word, as_json)
    else:
        _print_topics(as_json)


def _write(folder: Path) -> None:
    pages = {**recipe_pages(), "commands.md": commands_page()}
    for name, text in pages.items():
        write_asked(folder / name, text, replace=True)
    print(f"{len(pages)} pages written to {folder}")


def _print_topics(as_json: bool) -> None:
    topics = {
        "table": list(tables()),
        **{kind: list(registry) for kind, registry in REGISTRIES.items()},
        "recipe": list(shipped_recipes()),
        "command": list(COMMANDS),
        EXIT_CODES: [str(code.value) for code in sorted(ExitCode)],
    }
    if as_json:
        print(json.dumps(topics, indent=1))
        return
    print(
        "`trainer docs WORD` prints the help of any of these, and of a key such as optimizer.lr\n"
    )
    print_table([(kind, ", ".join(names)) for kind, names in topics.items()])


def _print_help(word: str, as_json: bool) -> None:
    found: dict[str, Sequence[Any]] = {
        "tables": tables_called(word),
        "components": components(word),
        "keys": keys_called(word),
        "commands": _commands_called(word),
        "recipes": [word] if word in shipped_recipes() else [],
        "exit_codes": [each for each in ExitCode if word in (EXIT_CODES, str(each.value))],
    }
    if not any(found.values()):
        hint = nearest_known(word, [*shipped_recipes(), *COMMANDS, EXIT_CODES])
        hint = hint or "`trainer docs` lists what there is"
        raise RecipeError(f"nothing is called {word!r}", hint)
    if as_json:
        shown = {kind: [_plain(each) for each in items] for kind, items in found.items() if items}
        print(json.dumps(shown, indent=1))
    else:
        print("\n\n".join(_texts(found)))


def _texts(found: dict[str, Sequence[Any]]) -> Iterator[str]:
    """Yield each thing that was found as text."""
    yield from map(_section_text, found["tables"])
    if found["components"]:
        yield _choice_text(found["components"])
    if found["keys"]:
        yield _keys_text(found["keys"])
    yield from map(_command_text, found["commands"])
    for name in found["recipes"]:
        start = f"to start from it: trainer new PATH --from {name}"
        yield f"{name}: {shipped_recipes()[name]}\n\n{start}"
    if found["exit_codes"]:
        yield table_text([(str(each.value), each.meaning) for each in found["exit_codes"]])


def _section_text(section: Section) -> str:
    name = f"{section.kind} {section.component}, in {section.header}" if section.kind else ""
    rows = [(each.key, each.type, each.default, each.description) for each in section.fields()]
    rows = [("key", "type", "default", "description"), *rows]
    return f"{name or section.header}\n{section.summary}\n\n{table_text(rows)}"


def _choice_text(choices: Sequence[Section]) -> str:
    rows = [
        (each.component, each.summary + (" The default." if each.is_default else ""))
        for each in choices
    ]
    return f'{choices[0].header}\nname = "..." picks one of these.\n\n{table_text(rows)}'


def _keys_text(keys: Sequence[Key]) -> str:
    by_recipe = {name: value for key in keys for name, value in key.recipes.items()}
    rows = [
        ("type", _merged((key.component, key.type) for key in keys)),
        ("default", _merged((key.component, key.default) for key in keys)),
        ("components", ", ".join(key.component for key in keys if key.component)),
        ("on resume", keys[0].on_resume),
        *((f"in {name}", value) for name, value in by_recipe.items()),
    ]
    description = _merged((key.component, key.description) for key in keys)
    return f"{keys[0].key}\n{description}\n\n{table_text([row for row in rows if row[1]])}"


def _merged(given: Iterator[tuple[str, str]]) -> str:
    """Return what the components say, once if they agree."""
    says: dict[str, list[str]] = {}
    for component, text in given:
        says.setdefault(text, []).append(component)
    if len(says) == 1:
        return next(iter(says))
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in says.items())


def _commands_called(word: str) -> list[CommandHelp]:
    first = word.split()[0] if word.split() else ""
    if first not in COMMANDS:
        return []
    found = list(command_help(first))
    return [each for each in found if f"{each.name} ".startswith(f"{word} ")]


def _command_text(command: CommandHelp) -> str:
    rows = "\n\n" + table_text(command.options) if command.options else ""
    return f"{command.usage}\n{command.summary}{rows}"


def _plain(item: Any) -> Any:
    if isinstance(item, Section):
        fields = [asdict(field) for field in item.fields()]
        return {
            "table": item.table,
            "kind": item.kind,
            "component": item.component,
            "summary": item.summary,
            "keys": fields,
        }
    if isinstance(item, ExitCode):
        return {"code": item.value, "meaning": item.meaning}
    return item if isinstance(item, str) else asdict(item)


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
