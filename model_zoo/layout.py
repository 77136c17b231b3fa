"""Everything about a family that is keyed by parameter names. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Where a family's parts are, and what others call them.

    Args:
        embed: path of the token embedding module.
        blocks: path of the `ModuleList` of repeated blocks: the units that FSDP, recomputation and
            compilation wrap, and between which a pipeline may cut.
        head: path of the module with final norm and projection.
        tensor: parameter name -> how tensor parallelism splits it and what enters and leaves its
            module: "columns", "rows", "key_value", "norm" or "vocabulary".
        context: whether positions meet in the kernels' attention alone, so that ranks can share a
            sequence.
        pipeline: whether `forward` computes some of the blocks alone.
        hf_names: our parameter name -> Hugging Face's; `{i}` stands for a block's number.
        hf_keys: key of Hugging Face's config.json (dots for nesting) -> key of ours, for what must
            agree if weights shall mean the same.
        hf_possible: key of config.json -> the values that the family can compute.
        hf_also: key of config.json -> key of ours, for what is read from there but may differ.
        hf_defaults: key of config.json -> what transformers takes where it is left out; a text
            names another key, whose value is taken. What is in neither must be given.
    """

    embed: str
    blocks: str
    head: str
    tensor: Mapping[str, str] = field(default_factory=dict)
    context: bool = False
    pipeline: bool = False
    hf_names: Mapping[str, str] = field(default_factory=dict)
    hf_keys: Mapping[str, str] = field(default_factory=dict)
    hf_possible: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    hf_also: Mapping[str, str] = field(default_factory=dict)
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)

    def tensor_styles(self, names: Iterable[str]) -> dict[str, str]:
        """Return the style of each parameter.

        Raises:
            KeyError: the table lacks some.
        """
        styles = {name: translate(name, self.tensor) for name in names}
        if missing := [name for name, style in styles.items() if style is None]:
            raise KeyError(f"no tensor parallel style for {', '.join(missing)}")
        return {name: style for name, style in styles.items() if style is not None}

    def to_hf(self, name: str) -> str | None:
        """Return Hugging Face's name of our parameter, or None where the table has none."""
        return translate(name, self.hf_names)

    def from_hf(self, name: str) -> str | None:
        """Return our name of a Hugging Face parameter, or None where the table has none."""
        return translate(name, {theirs: ours for ours, theirs in self.hf_names.items()})


def translate(name: str, table: Mapping[str, str]) -> str | None:
    """Return what a table calls a name; `{i}` in it stands for a block's number."""
    number = re.search(r"\.(\d+)\.", name)
    template = re.sub(r"\.\d+\.", ".{i}.", name, count=1)
    found = table.get(template)
    return found.replace("{i}", number[1]) if found and number else found
