"""Which weights multiply in low precision, and what keeps them from it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ...model_zoo.layout import translate
from ...model_zoo.matrices import is_matrix
from ..core.errors import nearest
from ..core.text.expressions import match_names
from ..parallel.placement import CUT_DIMS, shares_heads, used_dim
from .tables import MX, Float8, LowPrecision

if TYPE_CHECKING:
    from ...model_zoo.config import ModelConfig

Shape = tuple[int, ...]
Mismatch = tuple[tuple[str | int, ...], str, str]
"""key below the table, message, hint"""

EXPERTS_UNIT = 128
"""the widths of experts must be multiples of this: a block in float8 has 128 x 128 values"""


def required_multiple(table: LowPrecision) -> int:
    """Return the number of which both widths of a projection, and its tokens, must be multiples."""
    # torch._scaled_mm takes multiples of 16, and an MX block has 32 values.
    return 32 if isinstance(table, MX) else 16


def matmul_weights(config: ModelConfig) -> dict[str, Shape]:
    """Return the weights of blocks that multiply: those of projections, and of experts."""
    # The vocabulary may be unknown yet, and no weight of a block depends on its size.
    layout, shapes = config.layout, config.with_vocab(1).parameter_shapes()
    return {
        name: shape
        for name, shape in shapes.items()
        # Routers are none, and stay in high precision: rounding could change the choice of experts.
        if is_matrix(name, shape, layout)
    }


def select_weights(table: LowPrecision, config: ModelConfig) -> dict[str, Shape]:
    """Return the weights that a table names, and their whole shapes."""
    if not table.enabled:
        return {}
    takes, leaves = (
        [match_names(pattern) for pattern in patterns]
        for patterns in (table.targets, table.exclude)
    )
    return {
        name: shape
        for name, shape in matmul_weights(config).items()
        if any(test(name) for test in takes) and not any(test(name) for test in leaves)
    }


def float8_layers(table: Float8, config: ModelConfig) -> set[str]:
    """Return the paths of the layers whose input none but projections in float8 take."""
    if not table.gather_activations:
        return set()
    layout, chosen = config.layout, select_weights(table, config)
    takers: dict[str, list[bool]] = {}
    for name in matmul_weights(config):
        if not layout.is_expert(name) and translate(name, layout.tensor) != "rows":
            takers.setdefault(name.rsplit(".", 2)[0], []).append(name in chosen)
    return {layer for layer, are_chosen in takers.items() if all(are_chosen)}


def mismatches(
    table: LowPrecision, config: ModelConfig, tensor: int, expert_tensor: int
) -> Iterator[Mismatch]:
    """Yield the reasons why a table's weights cannot multiply in the table's format.

    Args:
        table: a table of `[precision]` that is enabled.
        config: the model's config.
        tensor: the number of ranks of the tensor axis, which split weights.
        expert_tensor: the number of ranks of the expert_tensor axis, which split experts.
    """
    yield from _unmatched(table, config)
    if isinstance(table, Float8) and table.gather_activations:
        yield from _ungathered(table, config)
    found = select_weights(table, config)
    experts = {name: shape for name, shape in found.items() if config.layout.is_expert(name)}
    others = {name: shape for name, shape in found.items() if name not in experts}
    pieces = {name: _piece(name, shape, config, tensor) for name, shape in others.items()}
    exclude = 'or precision.{}.exclude = ["{}"]'
    word = "float8" if isinstance(table, Float8) else "mx"
    if experts and isinstance(table, MX):
        message = f"the experts' products ({next(iter(experts))}) have no MX format here"
        hint = 'set precision.mx.exclude = ["*.experts.*"]; precision.float8 can take them'
        yield ("targets",), message, hint
    elif wrong := _uneven(_cut(experts, expert_tensor), EXPERTS_UNIT):
        name, shape = wrong
        on_ranks = f" on each of {expert_tensor} ranks" if expert_tensor > 1 else ""
        message = f"{name} is {shape[-2]} x {shape[-1]}{on_ranks}: "
        message += "experts in float8 have blocks of 128"
        hint = "give model.dim and model.moe.expert_ffn_dim that are multiples of 128, "
        yield ("targets",), message, hint + exclude.format(word, "*.experts.*")
    yield from _halves(experts, config)
    if wrong := _uneven(pieces, required_multiple(table)):
        name, shape = wrong
        on_ranks = f" on each of {tensor} ranks" if tensor > 1 else ""
        message = f"{name} is {shape[0]} x {shape[1]}{on_ranks}: "
        message += f"both must be multiples of {required_multiple(table)}"
        pattern = "*." + ".".join(name.split(".")[-3:])
        yield ("targets",), message, "give other sizes, " + exclude.format(word, pattern)


def _ungathered(table: Float8, config: ModelConfig) -> Iterator[Mismatch]:
    """Yield the reasons why no activations can be gathered in float8."""
    if table.recipe == "tensorwise":
        message = "a scale for all rows is not known before they are gathered"
        yield ("gather_activations",), message, 'take recipe = "rowwise", or leave it out'
    elif config.layout.tensor and not float8_layers(table, config):
        message = "no layer has all of its projections in float8"
        yield ("gather_activations",), message, "let targets match all projections of a layer"


def _unmatched(table: LowPrecision, config: ModelConfig) -> Iterator[Mismatch]:
    """Yield the patterns that match no weight of a matmul."""
    names, every = list(matmul_weights(config)), list(config.with_vocab(1).parameter_shapes())
    for key in ("targets", "exclude"):
        for index, pattern in enumerate(getattr(table, key)):
            test = match_names(pattern)
            if any(map(test, names)):
                continue
            only = "only what does not multiply in a block" if any(map(test, every)) else "nothing"
            hint = nearest(pattern, names) or f"weights are named like {names[0]} and {names[-1]}"
            yield (key, index), f'"{pattern}" matches {only}', hint


def _halves(experts: Mapping[str, Shape], config: ModelConfig) -> Iterator[Mismatch]:
    """Yield the first layer of experts of which the table names some weights and not the others."""
    for name in matmul_weights(config):
        path = name.rpartition(".")[0]
        siblings = [other for other in experts if other.startswith(f"{path}.")]
        if config.layout.is_expert(name) and siblings and name not in experts:
            message = f"{siblings[0]} is taken and {name} is not: experts multiply in one format"
            yield ("targets",), message, f'name both, such as "{path}.*", or none'
            return


def _uneven(shapes: Mapping[str, Shape], multiple: int) -> tuple[str, Shape] | None:
    """Return the first weight of which a width is not a multiple of `multiple`, and its shape."""
    return next(
        (each for each in shapes.items() if any(size % multiple for size in each[1][-2:])), None
    )


def _cut(experts: Mapping[str, Shape], ranks: int) -> dict[str, Shape]:
    """Return the shapes of the experts' weights that one rank of the expert_tensor axis holds."""
    found = {}
    for name, shape in experts.items():
        dim = CUT_DIMS["experts"][name.rpartition(".")[2]]
        found[name] = tuple(size // ranks if at == dim else size for at, size in enumerate(shape))
    return found


def _piece(name: str, shape: Shape, config: ModelConfig, tensor: int) -> Shape:
    """Return the shape of the part of a weight that a rank of the tensor axis multiplies with."""
    # With fewer heads of keys and values than ranks, each rank computes one whole head.
    style, dim = used_dim(name, config, tensor)
    if style == "key_value" and shares_heads(config, tensor):
        return shape[0] // int(config.n_kv_heads), shape[1]  # type: ignore[attr-defined]
    return tuple(-(-size // tensor) if at == dim else size for at, size in enumerate(shape))
