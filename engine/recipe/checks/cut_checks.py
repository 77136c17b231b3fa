"""Whether a pipeline can be cut where a recipe says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from ...core.errors import nearest
from ...core.text.positions import KeyPath
from ...core.text.printable import printable
from ..schema import Recipe

Finding = tuple[KeyPath, str, str]
"""key, message, hint"""

PATH: KeyPath = ("parallel", "pipelining")
MOST_BLOCKS = 10_000


def check_cut(recipe: Recipe, ranks: int, stages: int) -> Iterator[Finding]:
    """Yield what is wrong with the cut of a model into so many stages."""
    table = recipe.parallel.pipelining
    sizes: Any = recipe.model
    layers, modules = table.layers_per_stage, table.modules_per_stage
    if layers and modules:
        message = "the cut is given by layers_per_stage too"
        yield (*PATH, "modules_per_stage"), message, "keep one of them"
    if (layers or modules) and table.cost == "measured":
        yield (*PATH, "cost"), "the cut is given: nothing is measured", "keep one of them"
    if layers and (len(layers) != stages or sum(layers) != sizes.n_layers):
        message = (
            f"{len(layers)} stages of {sum(layers)} blocks; this plan has {stages} stages, the "
            f"model {sizes.n_layers} blocks"
        )
        yield (*PATH, "layers_per_stage"), message, "leave it out for a balanced cut"
    elif modules:
        yield from _modules(recipe, stages)
    elif stages > sizes.n_layers:
        message = f"{stages} stages are more than model.n_layers = {sizes.n_layers}"
        hint = f"at most {sizes.n_layers // (stages // ranks)} ranks"
        yield ("parallel", "pipeline"), message, hint


def _modules(recipe: Recipe, stages: int) -> Iterator[Finding]:
    layout, sizes = recipe.model.layout, recipe.parallel.pipelining.modules_per_stage
    count: int = recipe.model.n_layers  # type: ignore[attr-defined]
    path: KeyPath = (*PATH, "modules_per_stage")
    if len(sizes) != stages:
        message = f"{len(sizes)} stages are given, this plan has {stages}"
        yield path, message, "give as many lists, or other ranks, or stages_per_rank"
    if count > MOST_BLOCKS:
        yield (
            path,
            f"more than {MOST_BLOCKS:,} blocks are not cut by names",
            "give layers_per_stage",
        )
        return
    given = [name for names in sizes for name in names]
    order = [layout.embed, *(f"{layout.blocks}.{n}" for n in range(count)), layout.head]
    place = {name: number for number, name in enumerate(order)}
    shown = f"{order[0]}, {order[1]}, ..., {order[-1]}"
    for name in given:
        if name not in place:
            hint = nearest(name, order) or f"there are {shown}"
            yield path, f"the model has no {printable(repr(name))}", hint
    counts = Counter(given)
    for name, times in counts.items():
        if times > 1 and name in place:
            yield path, f"{name} is given {times} times", "a module is in one stage"
    if missing := [name for name in order if name not in counts]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield path, f"in no stage: {missing[0]}{more}", ""
    known = [name for name in given if name in place]
    for name, following in pairwise(known):
        if place[following] < place[name]:
            yield path, f"{name} stands before {following}", f"the order is {shown}"
            return
