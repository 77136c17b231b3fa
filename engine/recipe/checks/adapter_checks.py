"""Whether dropout and DoRA of `[lora]` go with the weights and with the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ....model_zoo.matrices import is_adapter
from ...core.text.tree import Finding
from ...lora.sizes import with_adapters
from ..schema import Recipe
from .plan_checks import OPEN_VOCABULARY


def check_adapters(recipe: Recipe) -> Iterator[Finding]:
    """Yield keys of `[lora]` that adapters of experts do not have, and dropout without keys."""
    lora, layout = recipe.lora, recipe.model.layout
    options = {"dropout": lora.dropout > 0, "dora": lora.dora}
    given = [key for key, is_on in options.items() if is_on]
    for key in given if not lora.rank else ():
        yield ("lora", key), "has no meaning without adapters", "set lora.rank"
    if not lora.rank or not given:
        return
    names = with_adapters(recipe.model.with_vocab(OPEN_VOCABULARY), lora)
    if any(is_adapter(name) and layout.is_expert(name) for name in names):
        for key in given:
            hint = 'leave experts out of lora.targets, such as "*.experts.*"'
            yield ("lora", key), f"adapters of experts have no {key}, as in PEFT", hint
    if lora.dropout and not recipe.task.needs_language_model:
        message = f'samples of the task "{recipe.task.name}" have no keys that dropout draws from'
        yield ("lora", "dropout"), message, "leave it out"
