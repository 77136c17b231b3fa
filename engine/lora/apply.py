"""Puts adapters beside the weights that a recipe names, and freezes all the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ...model_zoo.base import Constant, Model, Normal
from ...model_zoo.decoder import Block
from ...model_zoo.heads import is_head_layer
from ...model_zoo.layers.dense import Adapted, AdaptedLinear
from ...model_zoo.layout import Layout
from ...model_zoo.matrices import is_adapter
from ..core.errors import Problem, RecipeError, nearest
from ..core.text.expressions import match_names
from ..parallel.pipeline.cut import StageSplit
from .tables import LoRA

Rule = Normal | Constant


def add_adapters(model: Model, layout: Layout, table: LoRA) -> str:
    """Freeze a model and give the matrices that the patterns name an adapter, in place.

    Names of weights stay as they are. Call it before weights have memory, and before modules are
    wrapped or sharded.

    Returns:
        a line for the user that says how many parameters are trained.

    Raises:
        RecipeError: a pattern names no projection or expert in a block.
    """
    blocks = model.get_submodule(layout.blocks)
    layers = {
        f"{layout.blocks}.{path}": module
        for path, module in blocks.named_modules()
        # Blocks that no step computes are frozen already: their adapters would not be trained.
        if isinstance(module, Adapted) and any(w.requires_grad for w in module.parameters())
    }
    names = [f"{path}.{key}" for path, layer in layers.items() for key in layer.matrices]
    chosen = _choose(table.targets, names, model)
    rules: dict[str, Rule] = {}
    trained = total = 0
    # Before adapters are added: these are not counted as frozen, and stay trainable.
    for name, weight in model.named_parameters():
        # The layer of a task's head is new, or of another task: it is trained beside adapters.
        is_head = is_head_layer(name)
        weight.requires_grad_(is_head)
        trained, total = trained + is_head * weight.numel(), total + (not is_head) * weight.numel()
    for path, layer in layers.items():
        keys = [key for key in layer.matrices if f"{path}.{key}" in chosen]
        for key in keys:
            options: dict[str, Any] = {"dropout": table.dropout, "dora": table.dora}
            layer = layer.with_adapter(key, table.rank, table.scale(), **options)
        if keys:
            model.set_submodule(path, layer)
            if isinstance(layer, AdaptedLinear):
                digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
                layer.dropout_seed = int.from_bytes(digest, signed=True)
            rules |= {f"{path}.{name}": rule for name, rule in layer.initial_values().items()}
            named = layer.named_parameters(recurse=False)
            trained += sum(value.numel() for name, value in named if is_adapter(name))
    if table.dropout:
        pass_keys(layout.find_blocks(model))
    initial_values = partial(_initial_values, rules, model.initial_values)
    model.initial_values = initial_values  # type: ignore[method-assign]
    return (
        f"lora: adapters of rank {table.rank} on {len(chosen)} weights: "
        f"{trained:,} parameters are trained, {total:,} are frozen"
    )


def pass_keys(blocks: Iterable[nn.Module]) -> None:
    """Let blocks give their adapters the keys from which dropout draws.

    Raises:
        RecipeError: a block is of a kind that gives none.
    """
    for block in blocks:
        if not isinstance(block, Block):
            message = f"{type(block).__name__} gives its layers no keys from which dropout draws"
            raise RecipeError([Problem(message, key="lora.dropout", hint="leave it out")])
        layers = (each for each in block.modules() if isinstance(each, AdaptedLinear))
        block.dropping = tuple(each for each in layers if each.dropout)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute with its frozen weights alone, as it did before it was adapted."""
    adapted = [module for module in model.modules() if isinstance(module, Adapted)]
    scales = [module.scale for module in adapted]
    for module in adapted:
        module.scale = 0.0
    try:
        yield
    finally:
        for module, scale in zip(adapted, scales, strict=True):
            module.scale = scale


def require_adapters(model: Model, layout: Layout, cut: StageSplit) -> None:
    """Check that each rank of a pipeline has something to train.

    Args:
        model: this rank's part of the model.
        layout: the names of the model's parts.
        cut: how blocks are divided into stages.

    Raises:
        RecipeError: the stages of a rank have no adapter. All ranks raise it.
    """
    # With the names of other ranks' parameters each rank finds the same fault: one rank that raised
    # alone would leave the others waiting in a collective.
    names = [*model.remote_parameters, *(name for name, _ in model.named_parameters())]
    places = [name.removeprefix(f"{layout.blocks}.") for name in names if is_adapter(name)]
    adapted = {int(place.partition(".")[0]) for place in places}
    for rank in range(cut.ranks):
        blocks = [block for stage in cut.stages_of(rank) for block in cut.held_blocks(stage)]
        if adapted.isdisjoint(blocks):
            message = f"rank {rank} of the pipeline would train nothing: its blocks have no adapter"
            hint = "match weights in the blocks of each rank"
            raise RecipeError([Problem(message, key="lora.targets", hint=hint)])


def _initial_values(rules: Mapping[str, Rule], others: Callable[[str], Rule], name: str) -> Rule:
    return rules[name] if name in rules else others(name)


def _choose(patterns: list[str], names: list[str], model: Model) -> set[str]:
    """Return the names that at least one of the patterns matches."""
    chosen: set[str] = set()
    problems = []
    for index, pattern in enumerate(patterns):
        found = set(filter(match_names(pattern), names))
        if not found:
            every = [name for name, _ in model.named_parameters()]
            problems.append(_unmatched(index, pattern, names, every))
        chosen |= found
    # The default is for models of all kinds: blocks of experts alone have no other projection in
    # their feed-forward half.
    if problems and not (chosen and patterns == LoRA().targets):
        raise RecipeError(problems)
    return chosen


def _unmatched(index: int, pattern: str, names: list[str], every: list[str]) -> Problem:
    hint = nearest(pattern, names) or f"weights are named like {names[0]} and {names[-1]}"
    others = any(map(match_names(pattern), every))
    reason = (
        "only what cannot have an adapter: the projections and experts in blocks can"
        if others
        else ""
    )
    return Problem(
        f'"{pattern}" matches {reason or "no weight"}', key=f"lora.targets.{index}", hint=hint
    )
