"""`trainer data`: a corpus becomes tokens on disk. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.core.errors import ExitCode, RecipeError
from .data_merge import Dedup, merge, parse_part
from .data_text import describe_prepared, format_prepared, format_recipe, print_inspection
from .options import AsJson
from .table import echo
from .train_tokenizer import train_tokenizer

if TYPE_CHECKING:
    from ..engine.corpus.inspect import Inspection
    from ..engine.corpus.prepare import Preparation
    from ..engine.recipe.schema import Recipe
    from ..engine.sources.configs import DocumentSource

app = typer.Typer(no_args_is_help=True, help="Tokenise a corpus, look into it, train a tokenizer.")
app.command("train-tokenizer")(train_tokenizer)
app.command()(merge)

TokenizerName = Annotated[
    str, typer.Option("--tokenizer", help="one of trainer list tokenizer; default: hf with a path")
]
TokenizerPath = Annotated[str, typer.Option(help="its file or folder")]
Workers = Annotated[int, typer.Option(min=0, max=4096, help="processes; 0: one a core")]
ShardTokens = Annotated[
    int, typer.Option(min=2**16, max=2**40, help="tokens a file, a multiple of 65536", metavar="N")
]
OnError = Annotated[
    str, typer.Option(metavar="stop|skip", help="at a document that cannot be read")
]


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="folder to create")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="text, .jsonl, .parquet, saved datasets, folders and globs of them; or a recipe",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="its tokenizer; and its sources, where none are given"),
    ] = None,
    tokenizer: TokenizerName = "",
    tokenizer_path: TokenizerPath = "",
    source: Annotated[
        str, typer.Option(help="one of trainer list source; default: by the files' names")
    ] = "",
    field: Annotated[str, typer.Option(help="key or column that holds the text")] = "",
    on_error: OnError = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="a key of the sources; with --recipe: of the recipe"
        ),
    ] = None,
    workers: Workers = 0,
    shard_tokens: ShardTokens = 2**28,
    dedup: Dedup = "",
    part: Annotated[
        str, typer.Option(metavar="I/N", help="of the corpus, for one of N machines; then merge")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Tokenise once, for the source "tokens"; run the same command again after an interruption.

    Each document is followed by the end-of-document token. Several sources given here become one
    corpus, in their order; those of a recipe become a folder each.
    """
    from ..engine.corpus.merging.duplicates import parse_dedup
    from ..engine.corpus.prepare import Preparation

    overrides = _tokenizer_overrides(tokenizer, tokenizer_path)
    settings, dedup, share = settings or [], parse_dedup(dedup), parse_part(part)
    if dedup and part:
        raise RecipeError(f"--dedup {dedup} needs all parts", "give it to `trainer data merge`")
    if not recipe and sources and sources[0].endswith(".toml"):
        recipe, sources = Path(sources[0]), sources[1:]
    chosen = _source_overrides(
        sources or [], source, {"field": field, "on_error": on_error}, [] if recipe else settings
    )
    if not chosen and not recipe:
        raise RecipeError("nothing to prepare", "give files, folders or --recipe")
    loaded = _load(recipe, [*(settings if recipe else []), *overrides, *chosen])
    built = loaded.tokenizer.build()
    jobs = {
        out / name: Preparation(
            [each.for_tokenizer(built) for each in group],
            built,
            loaded.tokenizer.name,
            _check_shard_tokens(shard_tokens),
            workers,
            dedup,
            share,
        )
        for name, group in _group_sources(loaded, is_one_corpus=bool(chosen)).items()
    }
    _run(jobs, as_json, has_splits=bool(loaded.data.splits) and not chosen)


@app.command()
def retokenize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="a folder of tokens")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="folder to create")],
    tokenizer: TokenizerName = "",
    tokenizer_path: TokenizerPath = "",
    on_error: OnError = "stop",
    workers: Workers = 0,
    shard_tokens: ShardTokens = 2**28,
    as_json: AsJson = False,
) -> None:
    """Decode a folder of tokens and tokenise its documents with another tokenizer.

    A document whose text does not give its tokens again is an error, or left out on request.
    """
    from ..engine.corpus.prepare import Preparation
    from ..engine.corpus.retokenize import StoredDocuments

    overrides = _tokenizer_overrides(tokenizer, tokenizer_path)
    if not overrides:
        raise RecipeError("which tokenizer?", "give --tokenizer or --tokenizer-path")
    config = _load(None, overrides).tokenizer
    if on_error not in ("stop", "skip"):
        raise RecipeError(f"--on-error {on_error}: expected stop or skip")
    job = Preparation(
        [StoredDocuments.of(source, on_error)],
        config.build(),
        config.name,
        _check_shard_tokens(shard_tokens),
        workers,
    )
    _run({out: job}, as_json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="DIR|RECIPE", help="tokens, or a recipe")],
    samples: Annotated[int, typer.Option(min=0, max=1000, help="documents to show")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show what a corpus holds: counts, lengths, duplicates, samples; every byte is checked.

    Exit code 4 when a file is not what was written. The sources of a recipe are tokenised first.
    """
    from ..engine.corpus.inspect import inspect_folder

    is_recipe = path.suffix == ".toml"
    inspections = _inspect_recipe(path, samples) if is_recipe else [inspect_folder(path, samples)]
    if as_json:
        typer.echo(json.dumps([asdict(inspection) for inspection in inspections], indent=1))
    else:
        for inspection in inspections:
            print_inspection(inspection)
    if any(inspection.damaged for inspection in inspections):
        raise typer.Exit(ExitCode.DATA)


def _tokenizer_overrides(name: str, path: str) -> list[str]:
    """Return the `--set` for the recipe's `[tokenizer]` that the options mean."""
    if path and not name:
        name = "hf"
    overrides = [f"tokenizer.name={json.dumps(name)}"] if name else []
    return overrides + [f"tokenizer.path={json.dumps(path)}"] * bool(path)


def _source_overrides(
    paths: Sequence[str], kind: str, options: Mapping[str, str], settings: Sequence[str]
) -> list[str]:
    """Return the `--set` for the recipe's `[[data.sources]]` that arguments and options mean."""
    from ..engine.sources.files import infer_source

    tables = [{"name": kind or infer_source(path), "path": path} for path in paths]
    if not paths and kind:  # one that needs no path, such as a dataset on the hub
        tables = [{"name": kind}]
    given = {key: value for key, value in options.items() if value}
    if not tables and given:
        key, value = next(iter(given.items()))
        raise RecipeError(
            f"--{key.replace('_', '-')} is for sources given on the command line",
            f"for those of a recipe: --set data.sources.0.{key}={value}",
        )
    overrides = ["data.splits=[]", "data.sources=[]"] if tables else []
    for number, table in enumerate(tables):
        texts = [f"{key}={json.dumps(value)}" for key, value in (table | given).items()]
        overrides += [f"data.sources.{number}.{text}" for text in [*texts, *settings]]
    return overrides


def _load(recipe: Path | None, overrides: Sequence[str]) -> Recipe:
    from ..engine.recipe.load import load_overrides, load_recipe

    if recipe:
        loaded = load_recipe(recipe, overrides).recipe
        _require_documents(loaded)
        return loaded
    return load_overrides(["run.steps=1", *overrides]).recipe


def _require_documents(recipe: Recipe) -> None:
    task = recipe.task
    if task.fields or not task.needs_language_model:
        reads = f"records ({', '.join(task.fields)})" if task.fields else "samples of a data set"
        raise RecipeError(
            f'the task "{task.name}" reads {reads}, and no documents that become tokens',
            "`trainer run` prepares them",
        )


def _group_sources(recipe: Recipe, is_one_corpus: bool) -> dict[str, list[DocumentSource]]:
    """Return the sources of each folder, by the folder's name within the target."""
    from ..engine.sources.configs import DocumentSource

    # Sources of training splits are in a folder of the split's name, a dot and the other's.
    prefixes = [f"{split.name}." for split in recipe.data.splits] or [""]
    readable = {
        f"{prefix}{number}.{source.name}": source
        for prefix, table in zip(prefixes, recipe.data.tables, strict=True)
        for number, source in enumerate(table.sources)
        if isinstance(source, DocumentSource)
    }
    if is_one_corpus and len(readable) < len(recipe.data.all_sources):
        raise RecipeError("this source holds no documents to tokenise")
    if not readable:
        raise RecipeError("no source of the recipe holds documents to tokenise")
    if is_one_corpus or (len(readable) == 1 and not recipe.data.splits):
        return {"": list(readable.values())}
    return {name: [source] for name, source in readable.items()}


def _check_shard_tokens(shard_tokens: int) -> int:
    if shard_tokens % 2**16:
        raise RecipeError(f"--shard-tokens {shard_tokens}: not a multiple of 65536")
    return shard_tokens


def _run(jobs: dict[Path, Preparation], as_json: bool, *, has_splits: bool = False) -> None:
    from ..engine.corpus.prepare import prepare_folder
    from ..engine.corpus.progress import show_progress

    rows = []
    for folder, job in jobs.items():
        started = time.monotonic()
        with show_progress() as watch:
            is_new = prepare_folder(job, folder, watch)
        rows.append(describe_prepared(folder, is_new, started))
        if not as_json:
            echo(format_prepared(rows[-1]))
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        echo("\nin a recipe:\n\n" + format_recipe(jobs, has_splits=has_splits))


def _inspect_recipe(path: Path, samples: int) -> list[Inspection]:
    from ..engine.corpus.cache import cache_folder
    from ..engine.corpus.inspect import inspect_folder, inspect_store
    from ..engine.corpus.prepare import open_stores
    from ..engine.sources.configs import DocumentSource

    recipe = _load(path, [])
    tokenizer = recipe.tokenizer.build()
    cache = cache_folder(recipe.data.cache_dir)
    inspections = []
    for source in recipe.data.all_sources:
        if isinstance(source, DocumentSource) and source.is_streamed:
            echo(f"note: the streaming source {source.name} is left out", err=True)
            continue
        inspections += [
            inspect_folder(store.folder, samples, tokenizer)
            if store.folder
            else inspect_store(store, tokenizer, samples)
            for store in open_stores(source, tokenizer, cache)
        ]
    return [replace(each, tokenizer=recipe.tokenizer.name) for each in inspections]
