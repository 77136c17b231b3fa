"""Run directories made by hand, as a run leaves them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

WORDS = {math.inf: "Infinity", -math.inf: "-Infinity"}


def train_row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "loss": 5 / (1 + step / 50),
        "grad_norm": 1 + 1 / step,
        "lr": 1e-3,
        "tokens": 512 * step,
        "tokens_per_second": 1000.0,
        "step_seconds": 0.5,
        "data_seconds": 0.1,
        "mfu": 0.4,
        "memory_bytes": 2**30,
        "time": 1.7e9 + 0.5 * step,
        **more,
    }


def eval_row(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "loss": loss, "time": 1.7e9 + 0.5 * step}


def plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return WORDS.get(value, "NaN")
    return value


def make_run(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    recipe: str = "[run]\nsteps = 100\n",
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run directory; without `state`, one of an older version."""
    path.mkdir(parents=True)
    lines = [json.dumps({key: plain(value) for key, value in row.items()}) for row in rows]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (path / "recipe.toml").write_text(recipe)
    if state is not None:
        (path / "state.json").write_text(json.dumps({"total_steps": 100, **state}))
    return path


def hundred_steps(factor: float = 1.0) -> list[dict[str, Any]]:
    rows = []
    for step in range(10, 101, 10):
        row = train_row(step)
        rows += [row | {"loss": factor * row["loss"]}]
        if step % 20 == 0:
            rows.append(eval_row(step, factor * row["loss"] + 0.1))
    return rows
