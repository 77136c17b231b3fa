"""Hugging Face's config.json as one flat table, and the sizes that it gives. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

if TYPE_CHECKING:
    from .config import ModelConfig
    from .layout import Layout


class SettingsError(ValueError):
    """Settings that no model of the family can have.

    Args:
        problems: all of them, a sentence each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with its rotary settings under one spelling.

    transformers 5 writes `rope_parameters`; before, `rope_theta` and `rope_scaling`.
    """
    found = settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = {"rope_theta": settings.get("rope_theta"), **(found if isinstance(found, dict) else {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        # The same as any scaling by 1, and a recipe can say that one.
        rope = {"rope_theta": rope["rope_theta"], "factor": 1.0}
    named = {f"rope_parameters.{key}": value for key, value in rope.items()}
    # transformers 5 has one name for the number of experts, whatever a model's own is.
    experts = {"num_experts": settings.get("num_local_experts")}
    return {**experts, **settings, **named, "rope_parameters.rope_type": kind}


def impossible(settings: Mapping[str, Any], name: str, layout: Layout) -> list[str]:
    """Return which of the settings, made `flat`, the model family `name` cannot compute."""
    return [
        f"config.json says {key} = {shown(settings[key])}, "
        f'model "{name}" does {" or ".join(map(shown, possible))} only'
        for key, possible in layout.hf_possible.items()
        if settings.get(key) is not None and settings[key] not in possible
    ]


def inconsistent(settings: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """Return which of the settings are not what follows from the others, that a config holds."""
    here = config.hf_config()
    return [
        f"config.json says {key} = {shown(settings[key])}, "
        f'model "{config.name}" does {shown(here.get(key))} only, as its other keys say'
        for key in config.layout.hf_follow
        if settings.get(key) and settings[key] != here.get(key)
    ]


def sizes_of(settings: Mapping[str, Any], family: type[ModelConfig]) -> dict[str, Any]:
    """Return a model table's values: what config.json says, else what transformers takes.

    Raises:
        SettingsError: a size is missing, or the family cannot compute what is asked for.
    """
    layout, name = family.layout, family.model_fields["name"].default
    there = flat(settings)
    problems = impossible(there, name, layout)
    sizes: dict[str, Any] = {}
    for key, ours in {**layout.hf_keys, **layout.hf_also}.items():
        value = there.get(key)
        if value is None:
            value = layout.hf_defaults.get(key)
            if isinstance(value, str):
                value = there.get(value)
        if value is not None:
            _put(sizes, ours, value)
        elif key not in layout.hf_defaults and not key.startswith("rope_parameters."):
            problems.append(f"config.json does not say {key}")
    if problems:
        raise SettingsError(problems)
    return {"name": name, **_without_unit_scaling(sizes)}


def validate(family: type[ModelConfig], sizes: Mapping[str, Any]) -> ModelConfig:
    """Return the config object of some sizes.

    Raises:
        SettingsError: a value is impossible.
    """
    try:
        return family.model_validate(sizes)
    except ValidationError as error:
        raise SettingsError([_sentence(each) for each in error.errors()]) from None


def _sentence(error: Mapping[str, Any]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    key = ".".join(map(str, error["loc"]))
    return f"{key} = {shown(error['input'])}: {reason}" if key else reason


def shown(value: Any) -> str:
    """Return a foreign value as it may be printed."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, key = dotted.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    table[key] = value


def _without_unit_scaling(sizes: dict[str, Any]) -> dict[str, Any]:
    """Drop a rotary scaling by 1, which is how `flat` spells none."""
    if sizes.get("rope_scaling") == {"factor": 1.0}:
        del sizes["rope_scaling"]
    return sizes
