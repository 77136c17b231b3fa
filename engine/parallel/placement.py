"""How each parameter is stored: the dims that mesh axes split, and what decides it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...model_zoo.layout import translate
from ...model_zoo.matrices import DOWN, MAGNITUDE, UP, adapted_weight, is_adapter
from ..core.errors import Problem, RecipeError
from ..core.text.display import join_key
from .mesh import EXPERT_AXES, Degrees, expert_grid
from .rules import check_rules, deciding_patterns, deciding_rules

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig
    from .tables import Parallel

Shapes = Mapping[str, tuple[int, ...]]
"""the global shape of each parameter, by name"""

CUT_DIMS = {
    "columns": {"weight": 0, "bias": 0, UP: 0, MAGNITUDE: 0},
    "key_value": {"weight": 0, "bias": 0, UP: 0, MAGNITUDE: 0},
    "heads": {"sinks": 0},
    "rows": {"weight": 1, DOWN: 1},
    "vocabulary": {"weight": 0},
    "norm": {},
    "whole": {},
    "repeated": {},
    "experts": {
        "gate_up": 2,
        f"gate_up_{UP}": 2,
        "gate_up_bias": 2,
        "down": 2,
        f"down_{DOWN}": 2,
    },
}
"""For each style of `Layout.tensor`, and each parameter of a module of that style, the dim that is
split: a rank of the tensor axis computes with a part of it. With parameters that are not listed it
computes whole. "experts" is about the expert_tensor axis instead."""


@dataclass(frozen=True)
class ShardPlacement:
    """How ranks store one parameter.

    Attributes:
        name: the parameter's name in the model.
        shape: the parameter's global shape.
        place: for each mesh axis, "shard" or "tensor", the dim that it splits; None where the ranks
            of the axis hold the same. The shard axis has the ranks of `shard` and `context`. For
            experts there are also `EXPERT_AXES`, and the shard axis is that of `expert_grid`.
        decided_by: `rules.0 "PATTERN"`, `fsdp.ignored "PATTERN"`, `style "columns"` (the model's
            plan), "fsdp", or "whole".
    """

    name: str
    shape: tuple[int, ...]
    place: dict[str, int | None]
    decided_by: str


def placements_for(
    shapes: Shapes, config: ModelConfig, table: Parallel, degrees: Degrees
) -> list[ShardPlacement]:
    """Return how ranks store each parameter.

    The first rule that matches a name decides; for the others, the model's own plan does.
    """
    rules = deciding_rules(shapes, table.rules)
    ignored = deciding_patterns(shapes, table.fsdp.ignored)
    shard = 0 if table.is_sharded(degrees) else None
    found = []
    for name, shape in shapes.items():
        style, tensor = used_dim(name, config, degrees.tensor)
        where = {"shard": shard, "tensor": tensor}
        if degrees.expert_ranks > 1 and config.layout.is_expert(name):
            where, style = _place_of_expert(name, degrees), "experts"
            where |= {"shard": None if shard is None else _expert_shard_dim(shape, where, degrees)}
        decided_by = f'style "{style}"' if style else "whole" if shard is None else "fsdp"
        # Last, because a rule replaces what the model's plan says of both axes.
        if name in rules:
            index, rule = rules[name]
            decided_by = f'rules.{index} "{rule.match}"'
            where = {
                "shard": None if shard is None else rule.place.shard_dim,
                "tensor": rule.place.tensor if degrees.tensor > 1 else None,
            }
        if name in ignored and shard is not None:
            decided_by, where = f'fsdp.ignored "{ignored[name]}"', where | {"shard": None}
        found.append(ShardPlacement(name, shape, where, decided_by))
    return found


def _place_of_expert(name: str, degrees: Degrees) -> dict[str, int | None]:
    key = name.rpartition(".")[2]
    inside = CUT_DIMS["experts"].get(key) if degrees.expert_tensor > 1 else None
    return {"expert": 0, "expert_tensor": inside, "tensor": None}


def _expert_shard_dim(
    shape: tuple[int, ...], place: Mapping[str, int | None], degrees: Degrees
) -> int:
    """Return the first dim that FSDP's ranks can split into equal parts; 0 if there is none."""
    # FSDP2 pads dim 0, and refuses an uneven split of any other one (torch 2.13). Dim 0 counts the
    # experts of this rank, often fewer than FSDP's ranks: another dim then needs no padding.
    local = list(shape)
    for axis in EXPERT_AXES:
        if (dim := place[axis]) is not None:
            local[dim] //= getattr(degrees, axis)
    _, ranks = expert_grid(degrees, sharded=True)
    return next((dim for dim, size in enumerate(local) if size % ranks == 0), 0)


def require_divisible(
    shapes: Shapes, config: ModelConfig, table: Parallel, degrees: Degrees
) -> None:
    """Raise a RecipeError of all rules that these parameters cannot follow."""
    shard = degrees.fsdp if table.is_sharded(degrees) else 1
    findings = check_rules(
        shapes, table, lambda name: used_dim(name, config, degrees.tensor)[1], degrees.tensor, shard
    )
    problems = [Problem(message, join_key(key), hint=hint) for key, message, hint in findings]
    if problems:
        raise RecipeError(problems)


def require_aligned(found: Iterable[ShardPlacement], degrees: Degrees) -> None:
    """Raise a RecipeError of parameters whose shards torch cannot put together; see `aligns`."""
    for each in found:
        dim = each.place["tensor"]
        if dim is not None and dim == each.place["shard"]:
            size = each.shape[dim]
            if not aligns(size, degrees):
                message = describe_misalignment(each.name, size, degrees)
                hint = f"a multiple of {degrees.tensor} would do"
                raise RecipeError([Problem(message, key="parallel.tensor", hint=hint)])


def describe_misalignment(name: str, size: int, degrees: Degrees) -> str:
    """Return what cannot be split, and over which ranks."""
    ranks = f"{degrees.tensor} tensor ranks, and {degrees.fsdp} that shard what each of them has,"
    return f"{ranks} cannot share {name} = {size}"


def aligns(size: int, degrees: Degrees) -> bool:
    """Return whether torch knows which rows a rank holds of a dim that two axes split.

    FSDP splits what a tensor rank has. A DTensor says the opposite (torch 2.13, `_StridedShard`):
    the tensor axis splits what is left to FSDP's rank. Both are the same where the pieces are even.
    """
    by_tensor = [_chunk(part, degrees.fsdp) for part in _chunk(size, degrees.tensor)]
    return all(
        _chunk(sum(held), degrees.tensor) == [*held] for held in zip(*by_tensor, strict=True)
    )


def _chunk(size: int, ranks: int) -> list[int]:
    """Return the sizes of the pieces that torch.chunk makes, empty ones included."""
    piece = -(-size // ranks)
    return [max(0, min(piece, size - rank * piece)) for rank in range(ranks)]


def used_dim(name: str, config: ModelConfig, ranks: int) -> tuple[str, int | None]:
    """Return a parameter's style under tensor parallelism, and the dim that ranks split to compute.

    Args:
        name: the name of a weight, or of an adapter beside one.
        config: the model's config.
        ranks: the number of ranks of the tensor axis; with one there is no style.

    Returns:
        the style, and the dim; None where a rank computes with the whole parameter.

    Raises:
        KeyError: the model's plan has no style for the parameter.
    """
    if ranks == 1:
        return "", None
    # Experts are divided over `EXPERT_AXES`, not over the tensor axis.
    if config.layout.is_expert(name):
        return "whole", None
    key = name.rpartition(".")[2]
    # An adapter is split as the weight beside it: B [out, rank] where that has its rows split, A
    # [rank, in] where it has its columns split. The plan names weights alone.
    weight = adapted_weight(name) if is_adapter(name) else name
    style = translate(weight, config.layout.tensor)
    if style is None:
        raise KeyError(f"no tensor parallel style for {name}")
    if style == "key_value" and shares_heads(config, ranks):
        return style, None
    return style, CUT_DIMS[style].get(key)


def shares_heads(config: ModelConfig, ranks: int) -> bool:
    """Return whether a head's keys and values are needed on several ranks."""
    return int(getattr(config, "n_kv_heads", 0)) < ranks


def shards_experts(table: Parallel, degrees: Degrees) -> bool:
    """Return whether FSDP shards the weights of experts that a rank computes with."""
    is_sharded = table.is_sharded(degrees)
    if degrees.expert_ranks == 1:
        return is_sharded
    return table.fsdp.offload or expert_grid(degrees, sharded=is_sharded)[1] > 1
