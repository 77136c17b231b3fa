"""`trainer cache`: looks after the cache of prepared sources. Imports no torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.core.errors import ExitCode, RecipeError
from .options import AsJson
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.corpus.prune import CacheEntry

app = typer.Typer(no_args_is_help=True, help="List and prune what data was prepared into.")

Folder = Annotated[
    str, typer.Option("--cache-dir", help="data.cache_dir of the recipe; default: the user's cache")
]


@app.command("list")
def list_cache(cache_dir: Folder = "", as_json: AsJson = False) -> None:
    """List tokens and records in the cache of data, those first that were unused the longest."""
    from ..engine.corpus.cache import cache_folder
    from ..engine.corpus.prune import list_entries

    folder = cache_folder(cache_dir)
    entries = list_entries(folder)
    if as_json:
        typer.echo(json.dumps([_describe(entry) for entry in entries], indent=2))
        return
    rows = [["KIND", "SIZE", "LAST USED", "IN USE", "NAME", "SOURCE"]]
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
        in_use = "yes" if _describe(entry)["in_use"] else "no"
        size = _size_text(entry.bytes)
        rows.append([entry.kind, size, used, in_use, entry.path.name, entry.source])
    if entries:
        print_table(rows)
    echo(f"{folder}: {len(entries)} folders, {_size_text(sum(each.bytes for each in entries))}")


@app.command()
def prune(
    days: Annotated[
        float | None, typer.Option(min=0, help="what was not used for so many days")
    ] = None,
    max_gb: Annotated[
        float | None, typer.Option(min=0, help="the least used, until the rest is as small")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="all that no process uses")] = False,
    cache_dir: Folder = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would go")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete prepared data; a run that needs it prepares it again.

    What a process makes or has open stays. Exit code 3 when something else could not be deleted.
    """
    from ..engine.corpus.cache import cache_folder
    from ..engine.corpus.prune import choose_entries, delete_entry, is_in_use, list_entries

    if everything == (days is not None or max_gb is not None):
        raise RecipeError("what is to go?", "give --days, --max-gb or both, or --all")
    entries = list_entries(cache_folder(cache_dir))
    max_bytes = None if max_gb is None else max_gb * 1e9
    chosen = choose_entries(entries, days=days, max_bytes=max_bytes)
    used = [entry for entry in chosen if is_in_use(entry)]
    chosen = [entry for entry in chosen if entry not in used]
    reasons = {} if dry_run else {entry: delete_entry(entry) for entry in chosen}
    left = [f"{entry.path} is left: a process uses it" for entry in used]
    left += filter(None, reasons.values())
    removed = [entry for entry in chosen if not reasons.get(entry)]
    if as_json:
        rows = [_describe(entry) for entry in removed]
        typer.echo(json.dumps({"removed": rows, "left": left, "dry_run": dry_run}, indent=2))
    else:
        for entry in removed:
            word = "would remove" if dry_run else "removed"
            echo(f"{word} {entry.path} ({_size_text(entry.bytes)})")
        for text in left:
            echo(text, err=True)
    if any(reasons.values()):
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _describe(entry: CacheEntry) -> dict[str, Any]:
    from ..engine.corpus.prune import is_in_use

    facts = {**vars(entry), "path": str(entry.path)}
    return {**facts, "in_use": Path(entry.path).exists() and is_in_use(entry)}


def _size_text(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
