"""Whether a model can multiply in the formats that `[precision]` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ...core.text.positions import KeyPath
from ...precision.choose import chosen, misfits, unit
from ...precision.tables import MX
from ..schema import Recipe

Finding = tuple[KeyPath, str, str]
"""key, message, hint"""


def check_precision(recipe: Recipe, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """Yield everything that does not fit the formats.

    Args:
        recipe: tables that are each valid alone.
        degrees: those that are known, by axis.
    """
    tables = recipe.precision.narrow
    if not tables:
        return
    config = recipe.model.with_vocab(1)
    if not config.parameter_shapes():
        message = f'the model "{config.name}" does not say which weights it has'
        for word in tables:
            yield ("precision", word, "enabled"), message, "set it to false"
        return
    tensor = max(1, degrees.get("tensor", 1)) if config.layout.tensor else 1
    for word, table in tables.items():
        for key, message, hint in misfits(table, config, tensor, recipe.parallel.expert_tensor):
            yield ("precision", word, *key), message, hint
    twice = set.intersection(*(set(chosen(table, config)) for table in tables.values()))
    if len(tables) > 1 and twice:
        message = f"{min(twice)} is to multiply in float8 already"
        yield ("precision", "mx", "targets"), message, "exclude it from one of the two"
    yield from _dtype(recipe)
    yield from _tokens(recipe, degrees)


def _dtype(recipe: Recipe) -> Iterator[Finding]:
    compute = recipe.precision.compute
    emulated = all(table.emulate for table in recipe.precision.narrow.values())
    if compute == "fp16" or (compute == "fp32" and not emulated):
        words = " and ".join(recipe.precision.narrow)
        message = f'products in {words} are given back in bf16, not "{compute}"'
        yield ("precision", "compute"), message, 'take "bf16", or leave it to "auto"'


def _tokens(recipe: Recipe, degrees: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a number of tokens that gradients of weights cannot be summed over."""
    axes = ("context", "tensor") if recipe.model.layout.experts else ("context",)
    ranks = prod(max(1, degrees.get(axis, 1)) for axis in axes)
    tokens = recipe.data.seq_len // ranks
    for word, table in recipe.precision.narrow.items():
        if tokens % unit(table) == 0 or (table.emulate and not isinstance(table, MX)):
            continue
        where = f" on each of {ranks} ranks" if ranks > 1 else ""
        message = f"rows of {tokens} tokens{where} are no multiple of {unit(table)}, which "
        message += f"precision.{word} sums over"
        hint = f"give a multiple of {unit(table) * ranks}"
        yield ("data", "seq_len"), message, hint
