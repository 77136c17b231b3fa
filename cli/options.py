"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.files import require_path

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="a TOML file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change one value, such as optimizer.lr=1e-4"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def refuse_addresses(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command that takes no address, such as `s3://bucket/runs`, for a `Path`."""

    @wraps(command)
    def checked(**values: Any) -> Any:
        for value in values.values():
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Path):
                    require_path(each)
        return command(**values)

    return checked
