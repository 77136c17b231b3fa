"""`trainer checkpoint`: looks after the checkpoints of a run. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.core.errors import CheckpointError, ExitCode, RecipeError
from ..engine.core.text.display import remove_secrets
from .options import AsJson
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.core.run_dir import RunDirectory

app = typer.Typer(no_args_is_help=True, help="List, inspect, verify and prune checkpoints.")

AnyPath = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="a run directory, a checkpoints folder, or one checkpoint"),
]


@app.command("list")
def list_checkpoints(path: AnyPath, as_json: AsJson = False) -> None:
    """List checkpoints, oldest first; names and sizes of their files are checked."""
    rows = [_summary(checkpoint, hashes=False) for checkpoint in _checkpoints(path)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_rows(rows)


@app.command()
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="a run directory, a checkpoints folder, one checkpoint, a Hugging Face folder, or "
            "an id of the hub",
        ),
    ],
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint says of itself; of several, the newest that is complete."""
    from ..engine.checkpoint.find import candidates
    from ..engine.checkpoint.manifest import read_manifest, verify
    from ..engine.download.hub import resolve_folder

    path = resolve_folder(path)
    if not candidates(path) and (path / "config.json").is_file():
        _print_published(path, tensors, as_json)
        return
    found = _checkpoints(path)[::-1]
    intact = next((each for each in found if not verify(each, hashes=False)), found[0])
    manifest = read_manifest(intact)
    if as_json:
        typer.echo(json.dumps({"path": str(intact), **remove_secrets(asdict(manifest))}, indent=2))
        return
    facts = asdict(manifest)
    listed, files = facts.pop("tensors"), facts.pop("files")
    del facts["recipe"]
    facts = {"path": intact, **facts, "tensors": len(listed), "files": len(files)}
    facts["size"] = _size_text(manifest.bytes)
    for name, value in facts.items():
        echo(f"{name:12} {json.dumps(value) if isinstance(value, dict) else value}")
    if tensors:
        for name, entry in listed.items():
            echo(f"{name}  {entry['dtype']} {entry['shape']}")


def _print_published(folder: Path, tensors: bool, as_json: bool) -> None:
    """Print what a Hugging Face folder holds."""
    from ..engine.formats.hf_folder import list_tensors, read_config

    stored = list_tensors(folder)
    facts: dict[str, Any] = {
        "path": str(folder),
        "config": read_config(folder) or {},
        "tensors": len(stored),
        "parameters": sum(prod(tensor.shape) for tensor in stored.values()),
    }
    listed = {name: {"dtype": each.dtype, "shape": each.shape} for name, each in stored.items()}
    if as_json:
        typer.echo(json.dumps(facts | {"tensors": listed}, indent=2))
        return
    for name, value in facts.items():
        echo(f"{name:12} {json.dumps(value) if isinstance(value, dict) else value}")
    for name, entry in listed.items() if tensors else ():
        echo(f"{name}  {entry['dtype']} {[*entry['shape']]}")


@app.command()
def verify(path: AnyPath, as_json: AsJson = False) -> None:
    """Read every byte and compare it with what was saved; exit code 5 when something differs."""
    rows = [_summary(checkpoint, hashes=True) for checkpoint in _checkpoints(path)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_rows(rows)
    if any(row["problems"] for row in rows):
        raise typer.Exit(ExitCode.CHECKPOINT)


@app.command()
def prune(
    path: AnyPath,
    keep: Annotated[int, typer.Option(min=1, max=2**53, help="how many of the newest stay")],
    keep_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**53,
            show_default=False,
            help="steps whose multiples stay too; 0: none; default: the run's keep_every",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would go")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete older and abandoned checkpoints; the newest complete ones always stay.

    What killed saves and exports left goes too. Links are left, and said. Exit code 3 when
    something could not be deleted.
    """
    from ..engine.checkpoint import retention
    from ..engine.checkpoint.find import checkpoints_folder, is_checkpoint

    if is_checkpoint(path):
        raise RecipeError(f"{path} is one checkpoint", "give its run directory")
    found = _checkpoints(path)
    if keep_every is None:
        keep_every = _recorded_milestones(found[::-1])
    folder = checkpoints_folder(path)
    with _locked(folder.parent) as run:
        to_remove = retention.list_prunable(folder, keep, keep_every)
        to_remove += retention.list_abandoned(folder)
        links = [each for each in to_remove if each.is_symlink()]
        to_remove = [each for each in to_remove if each not in links]
        failures: list[str] = []
        if not dry_run:
            reasons = {each: retention.remove(each) for each in to_remove}
            to_remove = [each for each, why in reasons.items() if not why]
            failures = [*filter(None, reasons.values()), *retention.clear_leftovers(folder)]
            failures += run.clear_exports() if run else []
    left = [f"{each} is left: it is a link" for each in links] + failures
    if as_json:
        removed = [str(each) for each in to_remove]
        typer.echo(json.dumps({"removed": removed, "left": left, "dry_run": dry_run}))
    else:
        for each in to_remove:
            echo(f"{'would remove' if dry_run else 'removed'} {each}")
        for text in left:
            echo(text, err=True)
    if failures:
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints at a path, oldest first.

    Raises:
        CheckpointError: there is none.
    """
    from ..engine.checkpoint.find import candidates

    found = candidates(path)[::-1]
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}" + ("" if os.path.exists(path) else ": no folder")
        )
    return found


def _recorded_milestones(newest_first: Sequence[Path]) -> int:
    """Return `checkpoint.keep_every` of the recipe in the newest checkpoint that can be read."""
    from ..engine.checkpoint.manifest import read_manifest

    for checkpoint in newest_first:
        with suppress(CheckpointError):
            table = read_manifest(checkpoint).recipe.get("checkpoint")
            found = table.get("keep_every") if isinstance(table, dict) else 0
            return found if isinstance(found, int) else 0
    return 0


@contextmanager
def _locked(run: Path) -> Iterator[RunDirectory | None]:
    """Keep a run from starting in its directory meanwhile; None: there is no run.

    Raises:
        RunInUse: it runs already.
    """
    from ..engine.core.run_dir import RunDirectory

    if not (run / ".lock").exists():  # checkpoints without their run
        yield None
        return
    directory = RunDirectory(run)
    directory.lock()
    try:
        yield directory
    finally:
        directory.unlock()


def _summary(path: Path, hashes: bool) -> dict[str, Any]:
    from ..engine.checkpoint.manifest import read_manifest, verify
    from ..engine.checkpoint.retention import read_best_alias

    problems = verify(path, hashes)
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return {"path": str(path), "problems": problems}
    return {
        "path": str(path),
        "step": manifest.step,
        "samples": manifest.samples,
        "contents": manifest.contents,
        "bytes": manifest.bytes,
        "world": manifest.world,
        "saved_at": manifest.saved_at,
        "best": path == read_best_alias(path.parent),
        "problems": problems,
    }


def _print_rows(rows: list[dict[str, Any]]) -> None:
    cells = [["CHECKPOINT", "CONTENTS", "SIZE", "RANKS", "SAVED", "STATE"]]
    for row in rows:
        size = _size_text(row["bytes"]) if "bytes" in row else ""
        details = [str(row.get(key, "")) for key in ("contents", "world", "saved_at")]
        state = "; ".join(row["problems"]) or "complete" + ", best" * row["best"]
        cells.append([Path(row["path"]).name, details[0], size, details[1], details[2], state])
    print_table(cells)


def _size_text(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
