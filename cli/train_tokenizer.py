"""`trainer data train-tokenizer`: a byte-level BPE from a corpus."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson
from .table import echo

if TYPE_CHECKING:
    from ..engine.sources.configs import DocumentSource, SourceConfig


class OnError(StrEnum):
    """What happens to a document that cannot be read."""

    STOP = "stop"
    SKIP = "skip"


def train_tokenizer(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="files, folders or globs of text, .jsonl or .parquet; or a recipe: its sources",
        ),
    ],
    vocab_size: Annotated[
        int, typer.Option(min=257, max=2**22, help="tokens in all, bytes and special ones too")
    ],
    out: Annotated[Path, typer.Option(help="folder to create")],
    field: Annotated[str, typer.Option(help="key or column that holds the text")] = "text",
    special_token: Annotated[
        list[str] | None,
        typer.Option(help="give it again for several; the first ends a document"),
    ] = None,
    min_frequency: Annotated[
        int, typer.Option(min=1, max=2**53, help="pairs that are rarer are not merged")
    ] = 2,
    pattern: Annotated[
        str, typer.Option(help="how text is cut first: gpt2, cl100k, llama3, qwen2 or o200k")
    ] = "llama3",
    max_bytes: Annotated[
        int, typer.Option(min=0, max=2**53, help="read only so many bytes of text; 0: all")
    ] = 0,
    on_error: Annotated[
        OnError, typer.Option(help="documents that cannot be read; recipes say it themselves")
    ] = OnError.STOP,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer; the recipe's [tokenizer] then has name = "bpe" and path = the folder."""
    from ..engine.corpus import train_tokenizer as training

    started = time.monotonic()
    tokenizer, corpus = training.train_tokenizer(
        document_sources(sources, field, on_error),
        out,
        vocab_size=vocab_size,
        special_tokens=special_token or ["<|endoftext|>"],
        min_frequency=min_frequency,
        pattern=pattern,
        max_bytes=max_bytes,
    )
    summary = {
        "out": str(out),
        "vocab_size": tokenizer.vocab_size,
        "documents": corpus.documents,
        "bytes": corpus.bytes,
        "skipped": corpus.skipped,
        "seconds": round(time.monotonic() - started, 2),
    }
    if as_json:
        typer.echo(json.dumps(summary))
        return
    echo(
        f"{out}: {tokenizer.vocab_size:,} tokens from {corpus.documents:,} documents "
        f"({corpus.bytes:,} bytes) in {summary['seconds']} s"
    )
    if corpus.skipped:
        echo(f"note: {corpus.skipped:,} documents could not be read and were skipped")
    if tokenizer.vocab_size < vocab_size:
        echo(f"note: the text has too few frequent pairs for {vocab_size:,} tokens")


def document_sources(
    paths: Sequence[str], field: str, on_error: OnError = OnError.STOP
) -> list[DocumentSource]:
    """Return the training sources of recipes, and sources of other files by their names.

    Raises:
        RecipeError: a recipe is not valid, or has no sources of documents.
    """
    return [source for path in paths for source in _open_path(path, field, on_error)]


def _open_path(path: str, field: str, on_error: OnError) -> list[DocumentSource]:
    from ..engine.core.errors import RecipeError
    from ..engine.core.files import require_path
    from ..engine.recipe.load import load_recipe
    from ..engine.sources.configs import DocumentSource, sources
    from ..engine.sources.files import infer_source
    from ..engine.tokenizers.byte_tokenizer import ByteTokenizer

    require_path(path)
    configs: list[SourceConfig]
    if path.endswith(".toml"):
        table = load_recipe(path).recipe.data
        configs = [source for source in table.all_sources if source.split == "train"]
    else:
        config = sources[infer_source(path)]
        keys = {"name": infer_source(path), "path": path, "field": field}
        keys["on_error"] = on_error.value
        configs = [config.model_validate({k: keys[k] for k in keys if k in config.model_fields})]
    readable = [each for each in configs if isinstance(each, DocumentSource)]
    if not readable:
        raise RecipeError(f"{path}: no source in it holds documents")
    return [source.for_tokenizer(ByteTokenizer()) for source in readable]
