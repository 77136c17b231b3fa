"""Generates the records that a task reads, so that a check needs no files. Torch-free."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..tasks.tables import TaskConfig

WORDS = ("ore", "sun", "elm", "oak", "fir", "ivy", "fen", "ash", "yew", "bay")


def write_records(task: TaskConfig, folder: Path, count: int) -> Path | None:
    """Write records with the fields of a task, and return their file.

    Args:
        task: a task that reads records.
        folder: where the file is written.
        count: the number of records.

    Returns:
        None if the fields are those of no task of ours.
    """
    make = _MAKERS.get(task.fields)
    if make is None:
        return None
    generator = random.Random(0)
    lines = [json.dumps(make(generator, task)) for _ in range(count)]
    path = folder / "records.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _text(generator: random.Random, most: int) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))


def _classified(generator: random.Random, task: Any) -> Mapping[str, Any]:
    label: Any
    if task.problem == "regression":
        label = [generator.uniform(-1, 1) for _ in range(task.targets)]
    elif task.problem == "multi":
        label = [name for name in task.labels if generator.random() < 0.5]
    else:
        label = generator.choice(task.labels)
    return {"text": _text(generator, 8), "label": label}


def _words(generator: random.Random, task: Any) -> Mapping[str, Any]:
    words = _text(generator, 8).split()
    return {"tokens": words, "labels": generator.choices(task.labels, k=len(words))}


def _question(generator: random.Random, _: Any) -> Mapping[str, Any]:
    words = _text(generator, 8).split()
    number = generator.randrange(len(words))
    start = len(" ".join(words[:number])) + bool(number)
    answer = {"text": words[number], "answer_start": start}
    return {"question": _text(generator, 3), "context": " ".join(words), "answers": [answer]}


def _answers(generator: random.Random, _: Any) -> Mapping[str, Any]:
    return {
        "prompt": _text(generator, 3),
        "chosen": _text(generator, 6),
        "rejected": _text(generator, 6),
    }


_MAKERS: Mapping[tuple[str, ...], Callable[[random.Random, Any], Mapping[str, Any]]] = {
    ("text", "label"): _classified,
    ("tokens", "labels"): _words,
    ("question", "context", "answers"): _question,
    ("prompt", "chosen", "rejected"): _answers,
}
