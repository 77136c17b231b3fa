"""The numbers and facts of runs as rows of text. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..checkpoint.manifest import Manifest
from ..core.run_state import read_state
from ..drawing.elements import format_short
from .plots import SOURCE
from .runs import BITS, RunData, have_different_tokenizers, lacks_bits_per_byte
from .status import clock

MAX_SOURCES = 12
"""that have a column of their own"""


@dataclass(frozen=True)
class Number:
    """A column of the table of numbers."""

    title: str
    value: Callable[[RunData], float | None]
    show: Callable[[float], str] = format_short
    best: Callable[[Sequence[float]], float] | None = None
    """which of the runs' values is the best, where one is"""
    per_token: bool = False
    """whether runs of different tokenizers cannot be compared by it"""
    per_byte: bool = False
    """whether they can"""


def _perplexity(run: RunData) -> float | None:
    best = run.best_eval()
    return math.exp(best["loss"]) if best and best["loss"] < 700 else None


def _best_loss(run: RunData) -> float | None:
    best = run.best_eval()
    return best["loss"] if best else None


def _best_bits(run: RunData) -> float | None:
    column = [bits for bits in run.column("eval", BITS) if math.isfinite(bits)]
    return min(column, default=None)


def _memory(run: RunData) -> float | None:
    column = run.column("train", "memory_bytes")
    return max(column) / 2**30 if column else None


def _seconds(run: RunData) -> float | None:
    return run.last("train", "seconds")


def _loss_text(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else format_short(value)


NUMBERS = (
    Number("Step", lambda run: run.last("train", "step"), lambda value: f"{value:,.0f}"),
    Number("Tokens", lambda run: run.last("train", "tokens")),
    Number("Training loss", lambda run: run.last("train", "loss"), _loss_text, min, True),
    Number("Validation loss", lambda run: run.last("eval", "loss"), _loss_text, min, True),
    Number("Best validation", _best_loss, _loss_text, min, True),
    Number("Best perplexity", _perplexity, format_short, min, True),
    Number("Bits per byte", lambda run: run.last("eval", BITS), _loss_text, min, per_byte=True),
    Number("Best bits per byte", _best_bits, _loss_text, min, per_byte=True),
    Number(
        "Tokens/s", lambda run: run.median("train", "tokens_per_second"), format_short, max, True
    ),
    Number("MFU", lambda run: run.median("train", "mfu"), lambda value: f"{value:.1%}", max),
    Number("Peak memory", _memory, lambda value: f"{value:.2f} GiB", min),
    Number("Training time", _seconds, clock, None),
)


def _of_source(key: str) -> Number:
    title = f"Validation: {key.removeprefix(SOURCE)}"
    return Number(title, lambda run: run.last("eval", key), _loss_text, min, True)


def numbers_of(runs: Sequence[RunData]) -> list[tuple[Number, list[float | None]]]:
    """Return the columns that any run has a value for, with each run's.

    No run is the best by what a token of its own tokenizer means, nor by bits per byte that another
    run lacks.
    """
    keys = dict.fromkeys(key for run in runs for row in run.rows.get("eval", []) for key in row)
    by_source = [_of_source(key) for key in keys if key.startswith(SOURCE)][:MAX_SOURCES]
    columns = [*NUMBERS, *by_source]
    if have_different_tokenizers(runs):
        unknown = lacks_bits_per_byte(runs)
        columns = [
            replace(each, best=None) if each.per_token or (unknown and each.per_byte) else each
            for each in columns
        ]
    table = [(number, [number.value(run) for run in runs]) for number in columns]
    return [(number, values) for number, values in table if any(v is not None for v in values)]


def facts_of(run: RunData) -> dict[str, str]:
    """Return what is known of how a run was made."""
    manifest, record, status = run.manifest, read_state(run.path), run.status
    facts = {"State": status.state + (f": {status.reason}" if status.reason else "")}
    facts["Steps"] = f"{status.step:,} of {status.total_steps:,}" if status.total_steps else "?"
    facts["Attempts"] = str(status.attempts)
    if record is not None:
        facts |= {"Device": record.device, "Ranks": str(record.world)}
        facts |= {"Newest attempt": record.started_at, "Ended": record.ended_at or "not yet"}
    if manifest is not None:
        facts["Ranks"] = str(manifest.world)
        facts["Parameters"] = f"{_parameters(manifest):,}"
        facts["Versions"] = ", ".join(f"{name} {v}" for name, v in manifest.versions.items())
    steps = [f"{step:,}" for step in run.checkpoints]
    facts["Checkpoints"] = ", ".join(["…"] * (len(steps) > 8) + steps[-8:]) or "none"
    facts["Disk"] = f"{status.disk_bytes / 2**20:,.1f} MiB"
    facts["Folder"] = str(run.path)
    if status.events:
        facts["Events"] = f"{status.events:,}, the newest {status.newest_event}"
    if status.warnings:
        facts["Warnings"] = "; ".join(status.warnings)
    return facts


def _parameters(manifest: Manifest) -> int:
    return sum(
        math.prod(entry["shape"])
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    )
