"""Settings of other trainers that make more than one key of a recipe, or take more than one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.text.display import make_printable

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
HUB = {"c4": ("allenai/c4", "en")}
TYPES = {"completion": "text", "pretraining": "text"}
"""axolotl's types of data that are plain documents, and the column that they read by default"""

FILES = (".jsonl", ".json", ".parquet")
BASES = ("base_model", "model_name_or_path")
"""settings that name the base model"""


@dataclass
class Migration:
    """A recipe, and the settings that were not carried over.

    Attributes:
        values: the recipe as nested plain data, which is valid.
        left: (setting, reason) of everything that was not carried over.
        carried: the number of settings that were carried over.
    """

    values: dict[str, Any] = field(default_factory=dict)
    left: list[tuple[str, str]] = field(default_factory=list)
    carried: int = 0


@dataclass
class BatchSizes:
    """The sizes from which the sequences of an optimizer step follow."""

    ranks: int
    micro: int = 0
    accumulation: int = 1
    total: int = 0

    def set_sizes(self, values: dict[str, Any]) -> None:
        """Put the sizes that are known into a recipe."""
        if self.micro:
            values.setdefault("data", {})["micro_batch"] = self.micro
        # torchtitan's -1 is one micro batch a rank.
        total = self.total if self.total > 0 else self.micro * self.accumulation * self.ranks
        if total:
            values.setdefault("data", {})["global_batch"] = total


def put(values: dict[str, Any], target: str, value: Any) -> None:
    """Set a key such as `optimizer.lr`, and make the tables above it."""
    *tables, key = target.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[key] = value


def parse_number(value: Any) -> float:
    """Return a number that YAML may have read as text, such as 2e-5.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not NUMBER.fullmatch(str(value)):
        raise ValueError("expected a number")
    return float(value)


def _switch(word: str) -> Callable[..., None]:
    def convert(value: Any, _flat: Any, found: Migration, _batch: BatchSizes) -> None:
        if value is True or value == "auto":
            put(found.values, "precision.compute", word if value is True else "auto")

    return convert


def _batch_part(part: str) -> Callable[..., None]:
    def convert(value: Any, _flat: Any, _found: Migration, batch: BatchSizes) -> None:
        setattr(batch, part, int(parse_number(value)))

    return convert


def _beta(index: int) -> Callable[..., None]:
    def convert(value: Any, _flat: Any, found: Migration, _batch: BatchSizes) -> None:
        optimizer = found.values.setdefault("optimizer", {})
        betas = list(optimizer.get("betas", (0.9, 0.999)))  # the other trainer's defaults
        betas[index] = parse_number(value)
        optimizer["betas"] = betas

    return convert


def _warmup_ratio(
    value: Any, flat: Mapping[Any, Any], found: Migration, _batch: BatchSizes
) -> None:
    steps = flat.get(("max_steps",)) or flat.get(("training", "steps")) or 0
    if parse_number(steps) <= 0:
        raise ValueError("a share of an unknown number of steps: set schedule.warmup_steps")
    put(found.values, "schedule.warmup_steps", round(parse_number(value) * parse_number(steps)))


def _steps(value: Any, _flat: Any, found: Migration, _batch: BatchSizes) -> None:
    if (steps := int(parse_number(value))) > 0:  # -1: epochs count
        put(found.values, "run.steps", steps)
        found.values["run"].pop("epochs", None)


def _epochs(value: Any, flat: Mapping[Any, Any], found: Migration, _batch: BatchSizes) -> None:
    if parse_number(flat.get(("max_steps",)) or -1) <= 0:
        put(found.values, "run.epochs", parse_number(value))


def _dataset(value: Any, flat: Mapping[Any, Any], found: Migration, _batch: BatchSizes) -> None:
    config = flat.get(("dataset_config_name",)) or flat.get(("dataset_config",))
    column = flat.get(("dataset_text_field",)) or flat.get(("text_column",))
    repo, known_config = HUB.get(str(value), (str(value), config))
    if "/" not in repo:
        raise ValueError("name its path or repository in [[data.sources]]")
    _add_source(found, repo, known_config, column)


def _datasets(value: Any, _flat: Any, found: Migration, _batch: BatchSizes) -> None:
    left = []
    for index, entry in enumerate(value if isinstance(value, list) else [value]):
        entry = entry if isinstance(entry, dict) else {"path": entry}
        kind = str(entry.get("type", "completion"))
        place = str(entry.get("path", ""))
        if kind in TYPES and place:
            column = entry.get("field") or entry.get("text_column") or TYPES[kind]
            _add_source(found, place, entry.get("name"), column)
        elif kind in ("chat_template", "sharegpt") and place:
            source = {"name": "chat", **_find_place(place, entry.get("name"))}
            is_old = kind == "sharegpt" or entry.get("field_messages") == "conversations"
            old = {"field": "conversations", "role_key": "from", "content_key": "value"}
            _sources(found).append(source | old if is_old else source)
        else:
            left.append(f"{index} ({make_printable(place)}, type {make_printable(kind)})")
    if left:
        raise ValueError(f"write in [[data.sources]]: {', '.join(left)}")


def _sources(found: Migration) -> list[dict[str, Any]]:
    sources: list[dict[str, Any]] = found.values.setdefault("data", {}).setdefault("sources", [])
    return sources


def _add_source(found: Migration, place: str, config: Any, column: Any) -> None:
    kind = "parquet" if place.endswith(".parquet") else "jsonl"
    kind = kind if place.endswith(FILES) else "hf"
    source = {"name": kind, **_find_place(place, config)}
    _sources(found).append(source | ({"field": str(column)} if column else {}))


def _find_place(place: str, config: Any) -> dict[str, str]:
    """Return the keys of a source that name files, a folder, or a dataset on the hub."""
    if place.endswith(FILES) or place.startswith((".", "/", "~")):
        return {"path": place}
    return {"repo": place} | ({"config": str(config)} if config else {})


def _base(value: Any, _flat: Any, _found: Migration, _batch: BatchSizes) -> None:
    raise ValueError(
        f"add --from-hf {make_printable(str(value))} to train it further, with its sizes and "
        "its tokenizer"
    )


def _adapter(value: Any, _flat: Any, _found: Migration, _batch: BatchSizes) -> None:
    if value != "lora":
        raise ValueError("[lora] is the only adapter here")


def _report_to(value: Any, _flat: Any, found: Migration, _batch: BatchSizes) -> None:
    words = value if isinstance(value, list) else [value]
    if "tensorboard" in words:
        put(found.values, "metrics.tensorboard", True)
    if others := [str(word) for word in words if word not in ("tensorboard", "none")]:
        raise ValueError(f"here it is [[metrics.trackers]]: {', '.join(others)}")


def _min_lr(value: Any, flat: Mapping[Any, Any], found: Migration, _batch: BatchSizes) -> None:
    peak = flat.get(("learning_rate",)) or flat.get(("optimizer", "lr"))
    put(found.values, "schedule.min_lr_ratio", parse_number(value) / (parse_number(peak) or 1.0))


def _profile(_value: Any, flat: Mapping[Any, Any], _found: Migration, _batch: BatchSizes) -> None:
    if flat.get(("profiling", "enable_profiling")):
        raise ValueError("here it is [profile], once in a run")


def _per_epoch(table: str) -> Callable[..., None]:
    def convert(value: Any, _flat: Any, found: Migration, _batch: BatchSizes) -> None:
        if parse_number(value) > 0:
            put(found.values, f"{table}.interval_epochs", 1 / parse_number(value))

    return convert


def _strategy(table: str) -> Callable[..., None]:
    def convert(value: Any, _flat: Any, found: Migration, _batch: BatchSizes) -> None:
        if value == "epoch":
            put(found.values, f"{table}.interval_epochs", 1.0)
        elif value in ("no", False):
            put(found.values, f"{table}.interval", 0)

    return convert


SPECIAL: dict[str, Callable[..., None]] = {
    "bf16": _switch("bf16"),
    "fp16": _switch("fp16"),
    **dict.fromkeys(
        ("per_device_train_batch_size", "micro_batch_size", "local_batch_size", "batch_size"),
        _batch_part("micro"),
    ),
    "gradient_accumulation_steps": _batch_part("accumulation"),
    "global_batch_size": _batch_part("total"),
    **dict.fromkeys(("adam_beta1", "beta1"), _beta(0)),
    **dict.fromkeys(("adam_beta2", "beta2"), _beta(1)),
    "warmup_ratio": _warmup_ratio,
    **dict.fromkeys(("max_steps", "steps"), _steps),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), _epochs),
    **dict.fromkeys(("dataset", "dataset_name"), _dataset),
    "datasets": _datasets,
    **dict.fromkeys(BASES, _base),
    "adapter": _adapter,
    "report_to": _report_to,
    "min_lr": _min_lr,
    **dict.fromkeys(("enable_profiling", "profile_freq"), _profile),
    "evals_per_epoch": _per_epoch("evaluate"),
    "saves_per_epoch": _per_epoch("checkpoint"),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), _strategy("evaluate")),
    "save_strategy": _strategy("checkpoint"),
}
"""Settings that take more than one value of the file, or make more than one of the recipe."""
