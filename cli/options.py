"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="a TOML file")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change one value, such as optimizer.lr=1e-4"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
