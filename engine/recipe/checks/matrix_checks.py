"""Whether an optimizer of whole matrices fits the rest of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from ....model_zoo.matrices import is_adapter, maps_hidden_states
from ...core.text.expressions import ExpressionError, match_names
from ...core.text.tree import Finding
from ...lora.sizes import with_adapters
from ..schema import Recipe


def check_matrices(recipe: Recipe) -> Iterator[Finding]:
    """Yield everything that does not fit an optimizer of whole matrices.

    Args:
        recipe: tables that are each valid alone.
    """
    optimizer = recipe.optimizer
    if not optimizer.needs_matrices:
        return
    if recipe.memory.optimizer_in_backward:
        yield (
            ("memory", "optimizer_in_backward"),
            f'"{optimizer.name}" updates matrices together, after the backward pass',
            'set it to false, or take optimizer.name = "adamw"',
        )
    if recipe.precision.parameters == "bf16":
        yield (
            ("precision", "parameters"),
            f'"{optimizer.name}" keeps its weights in fp32, not in bf16',
            'take "fp32", or optimizer.name = "adamw"',
        )
    config = recipe.model.with_vocab(1)
    shapes = with_adapters(config, recipe.lora)
    # Where there are adapters, they are trained and the weights beside them are not.
    names = [name for name in shapes if not recipe.lora.rank or is_adapter(name)]
    matrices = {name for name in names if maps_hidden_states(name, shapes[name], config.layout)}
    if names and not matrices:
        message = f'the model "{config.name}" has no matrices beside its embeddings and head'
        yield ("optimizer", "name"), message, 'take "adamw"'
    if optimizer.bounds_scores:
        yield from _check_scores(recipe)
    if names and matrices:
        yield from _check_groups(recipe, names, matrices)


def _check_scores(recipe: Recipe) -> Iterator[Finding]:
    """Yield why attention scores cannot be bounded by shrinking queries and keys."""
    name, key = recipe.optimizer.name, ("optimizer", "name")
    config = recipe.model.with_vocab(1)
    hint = 'take "muon"'
    if not config.attention_rows():
        yield key, f'the model "{config.name}" does not say which rows belong to which head', hint
    elif config.normalises_heads:
        message = (
            f'"{name}" shrinks queries and keys, and the model "{config.name}" normalises them'
        )
        yield key, f"{message}: their norms (QK norm) bound the scores already", hint
    elif recipe.lora.rank:
        yield key, f'"{name}" shrinks whole projections, and adapters leave them frozen', hint


def _check_groups(recipe: Recipe, names: list[str], matrices: set[str]) -> Iterator[Finding]:
    """Yield the keys of groups that say something of matrices, or of others, and match none."""
    optimizer, left = recipe.optimizer, set(names)
    for index, group in enumerate(optimizer.groups):
        try:
            matches = match_names(group.match)
        except ExpressionError:
            return  # reported beside the pattern
        members = {name for name in left if matches(name)}
        left -= members
        for key in sorted(group.model_fields_set & optimizer.group_keys - optimizer.keys_of_both):
            is_of_matrices = key in optimizer.matrix_keys
            if members and not (members & matrices if is_of_matrices else members - matrices):
                kind, other = ("no matrix", "matrices") if is_of_matrices else (
                    "only matrices", "embeddings, heads, norms and biases"
                )  # fmt: skip
                yield (
                    ("optimizer", "groups", index, key),
                    f'"{group.match}" matches {kind}, and {key} is for {other}',
                    "leave it out, or name other parameters",
                )
