"""Reads the sizes of a model from Hugging Face's config.json, as transformers understands it.

`hf_keys.toml` says what each key means here. Torch-free.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .layout import Layout
from .sizes import SettingsError, quote

FLOAT_TOLERANCE = 1e-6
"""relative; fp32 holds about seven digits, and some writers of config.json print its numbers"""
ROPE = "rope_parameters."
SCALED = {
    "linear": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""kinds of rotary scaling, and the keys that each must have"""


@dataclass(frozen=True)
class Restriction:
    """The values of a key that are computed here.

    Attributes:
        key: key of config.json, with a dot where it is inside a table.
        possible: the values; "none" stands for null. Of a list each entry must be one of them.
        means: what the key decides.
        types: the model types that it is about; empty: all.
    """

    key: str
    possible: Sequence[Any]
    means: str
    types: Sequence[str] = ()

    def allows(self, settings: Mapping[str, Any]) -> bool:
        """Return whether the settings leave the key out, or have one of the values."""
        value = settings.get(self.key)
        if value is None:  # transformers takes null for false
            is_false = "none" in self.possible or not all(self.possible)
            return self.key not in settings or is_false
        if isinstance(value, list) and value:
            return all(item in self.possible for item in value)
        return value in self.possible and value != "none"


@dataclass(frozen=True)
class KnownKeys:
    """What the keys of config.json mean for one model type; see `hf_keys.toml`."""

    used: Sequence[str] = ()
    harmless: Sequence[str] = ()
    rope_used: Sequence[str] = ()
    rope_harmless: Sequence[str] = ()
    refused: Sequence[Restriction] = ()
    noted: Sequence[Restriction] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    optional: Sequence[str] = ()
    nullable: Sequence[str] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)

    def lists(self, key: str) -> bool:
        """Return whether a key of config.json, with a dot where it is inside a table, is known."""
        restricted = {each.key for each in (*self.refused, *self.noted)}
        if key.startswith(ROPE):
            inside = key.removeprefix(ROPE)
            return key in restricted or inside in (*self.rope_used, *self.rope_harmless)
        return key in restricted or key in (*self.used, *self.harmless, *self.synonyms)


@cache
def _catalogue() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("hf_keys.toml").read_text("utf-8"))


@cache
def known_keys(model_type: str) -> KnownKeys | None:
    """Return the meaning of keys for a `model_type` of config.json; None: the type is not known."""
    content = _catalogue()
    if model_type not in content.keys() - {"every", "refused", "noted"}:
        return None
    own, every = content[model_type], content["every"]
    joined = {name: [*keys, *own.get(name, ())] for name, keys in every.items()}
    limits = {
        name: [
            Restriction(**entry)
            for entry in content[name]
            if model_type in entry.get("types", [model_type])
            and entry["key"].removeprefix(ROPE) not in own.get("rope_used", ())
        ]
        for name in ("refused", "noted")
    }
    return KnownKeys(**{**own, **joined, **limits})


def known_keys_of(settings: Mapping[str, Any]) -> KnownKeys:
    """Return the meaning of keys for the type that config.json says; without one nothing is."""
    return known_keys(str(settings.get("model_type"))) or KnownKeys()


def flatten_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers completes it, with one spelling of each setting.

    What is left out is there with the value that transformers takes. Rotary settings are named
    `rope_parameters.KEY`, as transformers 5 has them; before, they were `rope_scaling` and
    `rope_theta`.
    """
    known = known_keys_of(settings)
    named = {target: settings[name] for name, target in known.synonyms.items() if name in settings}
    flat: dict[str, Any] = {**known.defaults, **named, **settings}
    if "num_attention_heads" in flat and flat.get("num_key_value_heads") is None:
        flat["num_key_value_heads"] = flat["num_attention_heads"]
    rope = {"partial_rotary_factor": flat.get("partial_rotary_factor"), **_complete_rope(flat)}
    named = {f"{ROPE}{key}": value for key, value in rope.items() if value is not None}
    return {**flat, **named}


def _complete_rope(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings with what transformers takes where one is left out."""
    found = flat.get("rope_scaling") or flat.get("rope_parameters")
    if found is None:
        found = known_keys_of(flat).rope
    rope = {"rope_theta": flat.get("rope_theta"), **(found if isinstance(found, dict) else {})}
    rope = {**rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"}
    if rope["rope_type"] == "default":
        kept = ("rope_theta", "rope_type", "partial_rotary_factor", "mrope_section")
        # The same as any scaling by 1, and a recipe can say that one.
        return {**{key: rope[key] for key in kept if key in rope}, "factor": 1.0}
    if rope["rope_type"] in SCALED:
        own = "original_max_position_embeddings"
        longest = flat.get("max_position_embeddings")
        rope[own] = flat.get(own) or rope.get(own) or longest
        if rope.get("factor", 0) is None and longest and isinstance(rope[own], int):
            rope["factor"] = longest / rope[own]
    if rope["rope_type"] == "longrope" and longest and isinstance(rope[own], int):
        rope["factor"] = rope.get("factor") or longest / max(1, rope[own])
    if rope["rope_type"] == "yarn":
        rope |= {
            "beta_fast": rope.get("beta_fast") or 32.0,
            "beta_slow": rope.get("beta_slow") or 1.0,
            "truncate": bool(rope.get("truncate", True)),
            **{key: rope.get(key) or 0.0 for key in ("mscale", "mscale_all_dim")},
            "attention_factor": rope.get("attention_factor") or 0.0,
        }
    return rope


def find_unsupported(settings: Mapping[str, Any], name: str, layout: Layout) -> list[str]:
    """Return a sentence for each flattened setting that the model family `name` cannot compute."""
    refused = [Restriction(key, possible, "") for key, possible in layout.hf_possible.items()]
    return [
        f"config.json says {each.key} = {quote(settings[each.key])}"
        f"{f' ({each.means})' if each.means else ''}, "
        f'model "{name}" does {_quote_values(each)} only'
        for each in (*refused, *known_keys_of(settings).refused)
        if not each.allows(settings)
    ]


def find_notes(settings: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each key of config.json that is not done here but changes no logit."""
    known = known_keys(str(settings.get("model_type")))
    if known is None:
        return []
    notes = [
        f"config.json says {each.key} = {quote(settings[each.key])} ({each.means}): not done here"
        for each in known.noted
        if not each.allows(settings)
    ]
    rope = settings.get("rope_scaling") or settings.get("rope_parameters")
    inside = [f"{ROPE}{key}" for key in rope] if isinstance(rope, dict) else []
    unknown = [key for key in (*settings, *inside) if not known.lists(key)]
    if unknown:
        notes.append(f"keys of config.json that are not known, and ignored: {quote(unknown)}")
    return notes


def _quote_values(restriction: Restriction) -> str:
    return " or ".join(
        "null" if value == "none" else quote(value) for value in restriction.possible
    )


def agree(one: Any, other: Any) -> bool:
    """Return whether two settings are equal, numbers with a fraction to `FLOAT_TOLERANCE`."""
    numbers = (int, float)
    if isinstance(one, numbers) and isinstance(other, numbers) and float in map(type, (one, other)):
        return math.isclose(one, other, rel_tol=FLOAT_TOLERANCE)
    return bool(one == other)


def find_mismatches(
    there: Mapping[str, Any], here: Mapping[str, Any], name: str, layout: Layout
) -> list[str]:
    """Return a sentence for each setting that contradicts those a config was made of.

    Args:
        there: flattened settings of a folder.
        here: what the config says in config.json.
        name: the model family.
        layout: its layout.
    """
    return [
        f"config.json says {key} = {quote(there[key])}, "
        f'model "{name}" does {quote(here.get(key))} only, as its other keys say'
        for key in layout.hf_follow
        if there.get(key) is not None and there[key] != here.get(key)
    ]


def read_sizes(flat: Mapping[str, Any], name: str, layout: Layout) -> dict[str, Any]:
    """Return the values of `[model]` that flattened settings say.

    Raises:
        SettingsError: a size is missing, or the family cannot compute what is asked for.
    """
    known = known_keys_of(flat)
    problems, optional = find_unsupported(flat, name, layout), known.optional
    sizes: dict[str, Any] = {"name": name}
    for key, ours in {**layout.hf_keys, **layout.hf_also}.items():
        if (value := flat.get(key)) is not None:
            _put(sizes, ours, value)
        # Keys of a rotary scaling are absent from models without one.
        elif key not in (*optional, *known.nullable) and not ours.startswith("rope_scaling."):
            problems.append(f"config.json does not say {key}")
    needed = [] if problems else SCALED.get(flat[f"{ROPE}rope_type"], ())
    missing = [key for key in needed if flat.get(f"{ROPE}{key}") is None]
    problems += [f"config.json does not say {ROPE}{key}" for key in missing]
    if problems:
        raise SettingsError(problems)
    # A rotary scaling by 1 is how `flatten_settings` spells none.
    if sizes.get("rope_scaling") == {"factor": 1.0}:
        del sizes["rope_scaling"]
    return sizes


def _put(table: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, key = dotted.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
    table[key] = value
