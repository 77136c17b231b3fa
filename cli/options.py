"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.core.errors import RecipeError
from ..engine.core.files import path_fault, require_path
from ..engine.core.text.display import remove_secret
from .complete import complete_override

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="a TOML file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        autocompletion=complete_override,
        help="change one value, such as optimizer.lr=1e-4",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="replace a file that is there")]
Plugins = Annotated[
    list[str] | None,
    typer.Option("--plugin", help="Python module that registers the model or tokenizer"),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        help="files that the recipe reads must exist, and models of the hub must be in the cache; "
        "else exit code 2",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def check_paths(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that takes no address for a `Path`, and foresees what paths can do.

    A path may be too long, or on a disk that is read-only or full, wherever it is used.
    """

    @wraps(command)
    def checked(**values: Any) -> Any:
        for value in values.values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Path):
                    require_path(each)
        try:
            return command(**values)
        except OSError as error:
            if fault := path_fault(error):
                raise fault from error
            raise

    return checked


def require_no_secret(overrides: Sequence[str]) -> None:
    """Refuse `KEY=VALUE` settings with secrets where they would be written to a script.

    Raises:
        RecipeError: one has a secret.
    """
    for override in overrides:
        if remove_secret(override) != override:
            raise RecipeError(
                f"{override.partition('=')[0]}: the script would hold its password",
                "write it in the recipe's file, or give it by the environment",
            )
