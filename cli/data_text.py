"""The output of `trainer data`."""

from __future__ import annotations

import json
import time
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


def describe_prepared(folder: Path, is_new: bool, started: float) -> dict[str, Any]:
    """Return the counts of a folder of tokens.

    Args:
        folder: the folder.
        is_new: whether it was made now.
        started: when, by `time.monotonic`.
    """
    from ..engine.corpus.manifest import read_manifest

    counts = {"num_tokens", "num_documents", "text_bytes", "empty", "skipped", "faults"}
    facts = {"out": str(folder), "new": is_new, "seconds": round(time.monotonic() - started, 2)}
    found = read_manifest(folder).model_dump(mode="json", include={*counts, "duplicates"})
    return {**facts, **found}


def format_prepared(row: Mapping[str, Any]) -> str:
    """Return the size of a folder of tokens, in a line."""
    text = f"{row['out']}: {row['num_tokens']:,} tokens in {row['num_documents']:,} documents"
    if not row["new"]:
        return f"{text}, already done"
    if row["empty"]:
        text += f", {row['empty']:,} empty"
    if row["duplicates"]:
        text += f", {row['duplicates']:,} duplicates left out"
    if row["skipped"]:
        text += f", {row['skipped']:,} skipped, such as {row['faults'][0]}"
    return f"{text}; {row['text_bytes'] / 1e6:,.2f} MB of text in {row['seconds']} s"


def format_recipe(jobs: Mapping[Path, Preparation], *, has_splits: bool = False) -> str:
    """Return the tables with which a recipe reads the folders.

    Args:
        jobs: what was prepared, by folder.
        has_splits: whether folders begin with the name of a training split and a dot.
    """
    from ..engine.tokenizers.configs import tokenizers

    folder, job = next(iter(jobs.items()))
    lines = ["[tokenizer]", f'name = "{job.tokenizer_name}"']
    if "path" in tokenizers[job.tokenizer_name].model_fields:
        lines.append(f"path = {_quoted(folder / 'tokenizer')}")
    for folder, job in jobs.items():
        source, table = job.sources[0], "data.splits.sources" if has_splits else "data.sources"
        split = f'\n[[data.splits]]\nname = "{folder.name.split(".")[0]}"'
        lines += [split] * (has_splits and split not in lines)
        lines += ["", f"[[{table}]]", 'name = "tokens"', f"path = {_quoted(folder)}"]
        lines += [f"weight = {source.weight}"] * (source.weight != 1)
        lines += [f'split = "{source.split}"'] * (source.split != "train")
    return "\n".join(lines)


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def print_inspection(inspection: Inspection) -> None:
    """Print counts, a histogram of lengths, and some documents."""
    echo(f"{inspection.place}\n")
    print_table(_facts(inspection))
    echo("\ntokens a document")
    most = max(bar.documents for bar in inspection.histogram)
    print_table(
        [
            [
                f"{bar.shortest:,} to {bar.longest:,}".rjust(26),
                f"{bar.documents:,}".rjust(14),
                "#" * -(-bar.documents * BAR_WIDTH // most),
            ]
            for bar in inspection.histogram
        ]
    )
    for number, text in inspection.samples.items():
        if pieces := inspection.loss_samples.get(number):
            marked = "".join(f"»{each.text}«" if each.in_loss else each.text for each in pieces)
            echo(f"\ndocument {number:,}, »between these marks« what counts in the loss:")
            echo(f"  {make_printable(marked)}")
        else:
            echo(f"\ndocument {number:,}:\n  {make_printable(text[:SAMPLE_CHARACTERS])}")
    for name in inspection.damaged:
        echo(f"\ndamaged: {name} is not what was written")
    if inspection.unchecked:
        names = " and ".join(inspection.unchecked)
        echo(f"\nnot checked: {names}: an older version wrote no checksums for them")
    echo()


def _facts(inspection: Inspection) -> list[list[str]]:
    quantiles = ", ".join(f"{name} {value:,}" for name, value in inspection.quantiles.items())
    same = inspection.duplicates
    duplicates = f"{same.documents:,} ({same.tokens:,} tokens)"
    if same.documents:
        duplicates += f"; document {same.most_frequent:,} is there {same.times:,} times"
    facts = {
        "documents": f"{inspection.documents:,}",
        "tokens": f"{inspection.tokens:,}",
        "lengths": f"mean {inspection.mean_length:,.1f}, {quantiles}",
        "duplicates": duplicates,
        "empty": f"{inspection.empty:,}",
        "skipped": f"{inspection.skipped:,}"
        + (f", such as {make_printable(inspection.faults[0])}" if inspection.faults else ""),
    }
    if inspection.learned_tokens != inspection.tokens:
        share = inspection.learned_tokens / inspection.tokens
        facts["learned from"] = f"{inspection.learned_tokens:,} tokens ({share:.1%})"
    if inspection.text_bytes:
        ratio = inspection.text_bytes / inspection.tokens
        facts["text"] = f"{inspection.text_bytes / 1e6:,.2f} MB, {ratio:.2f} bytes a token"
    if inspection.tokenizer:
        facts["tokenizer"] = make_printable(inspection.tokenizer)
    return [[name, value] for name, value in facts.items()]
