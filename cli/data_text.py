"""What `trainer data` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.core.text.display import make_printable
from .table import echo, print_table

if TYPE_CHECKING:
    from ..engine.corpus.inspect import Inspection
    from ..engine.corpus.prepare import Preparation

BAR_WIDTH = 40
SAMPLE_CHARACTERS = 300


def prepared_text(row: Mapping[str, Any]) -> str:
    """Return what a folder of tokens holds, in a line."""
    text = f"{row['out']}: {row['num_tokens']:,} tokens in {row['num_documents']:,} documents"
    if not row["new"]:
        return f"{text}, already done"
    if row["empty"]:
        text += f", {row['empty']:,} empty"
    if row["skipped"]:
        text += f", {row['skipped']:,} skipped, such as {row['faults'][0]}"
    return f"{text}; {row['text_bytes'] / 1e6:,.2f} MB of text in {row['seconds']} s"


def recipe_lines(jobs: Mapping[Path, Preparation]) -> str:
    """Return the tables with which a recipe reads the folders."""
    from ..engine.tokenizers.configs import tokenizers

    folder, job = next(iter(jobs.items()))
    lines = ["[tokenizer]", f'name = "{job.tokenizer_name}"']
    if "path" in tokenizers[job.tokenizer_name].model_fields:
        lines.append(f"path = {_quoted(folder / 'tokenizer')}")
    for folder, job in jobs.items():
        source = job.sources[0]
        lines += ["", "[[data.sources]]", 'name = "tokens"', f"path = {_quoted(folder)}"]
        lines += [f"weight = {source.weight}"] * (source.weight != 1)
        lines += [f'split = "{source.split}"'] * (source.split != "train")
    return "\n".join(lines)


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def print_inspection(found: Inspection) -> None:
    """Print counts, a histogram of lengths, and some documents."""
    echo(f"{found.place}\n")
    print_table(_facts(found))
    echo("\ntokens a document")
    most = max(bar.documents for bar in found.histogram)
    print_table(
        [
            [
                f"{bar.shortest:,} to {bar.longest:,}".rjust(26),
                f"{bar.documents:,}".rjust(14),
                "#" * -(-bar.documents * BAR_WIDTH // most),
            ]
            for bar in found.histogram
        ]
    )
    for number, text in found.samples.items():
        echo(f"\ndocument {number:,}:\n  {make_printable(text[:SAMPLE_CHARACTERS])}")
    for name in found.damaged:
        echo(f"\ndamaged: {name} is not what was written")
    if found.unchecked:
        names = " and ".join(found.unchecked)
        echo(f"\nnot checked: {names}: an older version wrote no checksums for them")
    echo()


def _facts(found: Inspection) -> list[list[str]]:
    quantiles = ", ".join(f"{name} {value:,}" for name, value in found.quantiles.items())
    same = found.duplicates
    duplicates = f"{same.documents:,} ({same.tokens:,} tokens)"
    if same.documents:
        duplicates += f"; document {same.most_frequent:,} is there {same.times:,} times"
    facts = {
        "documents": f"{found.documents:,}",
        "tokens": f"{found.tokens:,}",
        "lengths": f"mean {found.mean_length:,.1f}, {quantiles}",
        "duplicates": duplicates,
        "empty": f"{found.empty:,}",
        "skipped": f"{found.skipped:,}"
        + (f", such as {make_printable(found.faults[0])}" if found.faults else ""),
    }
    if found.learned_tokens != found.tokens:
        share = found.learned_tokens / found.tokens
        facts["learned from"] = f"{found.learned_tokens:,} tokens ({share:.1%})"
    if found.text_bytes:
        ratio = found.text_bytes / found.tokens
        facts["text"] = f"{found.text_bytes / 1e6:,.2f} MB, {ratio:.2f} bytes a token"
    if found.tokenizer:
        facts["tokenizer"] = make_printable(found.tokenizer)
    return [[name, value] for name, value in facts.items()]
