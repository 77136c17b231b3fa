"""Which parameters multiply: projections, stacks of experts, and the adapters beside them.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layout import Layout

DOWN, UP, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"


@dataclass(frozen=True)
class HeadRows:
    """How the rows of a projection belong to the heads of attention, one head after the other.

    Attributes:
        heads: the number of heads.
        matrices: for each matrix that a head joins, such as those of its key and of its value, the
            number of rows.
        powers: for some rows of a head after the others, their number, and the power of a factor
            that multiplies them so that the head's scores are multiplied by the factor.
    """

    heads: int
    matrices: tuple[int, ...]
    powers: tuple[tuple[int, float], ...]

    @property
    def block_rows(self) -> tuple[int, ...]:
        """The numbers of rows of all heads' matrices."""
        return self.matrices * self.heads


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name, with any prefix, is one of an adapter's."""
    return name.endswith((DOWN, UP, MAGNITUDE))


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of A and B of the adapter beside a weight."""
    path, _, leaf = weight.rpartition(".")
    # A projection has one weight, a module of experts two.
    start = f"{path}." if leaf == "weight" else f"{weight}_"
    return start + DOWN, start + UP


def magnitude_name(weight: str) -> str:
    """Return the name of the magnitudes of DoRA beside a projection's weight."""
    return weight.removesuffix("weight") + MAGNITUDE


def adapted_weight(name: str) -> str:
    """Return the name of the weight that an adapter's parameter lies beside."""
    start = name.removesuffix(DOWN).removesuffix(UP).removesuffix(MAGNITUDE)
    return start[:-1] if start.endswith("_") else f"{start}weight"


def is_stack(name: str, layout: Layout) -> bool:
    """Return whether a parameter is a stack of the experts' matrices."""
    return layout.is_expert(name) and not name.endswith("_bias") and not is_adapter(name)


def is_matrix(name: str, shape: tuple[int, ...], layout: Layout) -> bool:
    """Return whether a parameter is a projection in a block, or a stack of them."""
    if not layout.blocks or not name.startswith(f"{layout.blocks}."):
        return False
    if layout.is_expert(name):
        return is_stack(name, layout)
    # A router chooses, in high precision.
    return len(shape) == 2 and name.endswith(".weight") and ".router." not in name


def maps_hidden_states(name: str, shape: tuple[int, ...], layout: Layout) -> bool:
    """Return whether a parameter is a matrix inside of the model, or a stack of matrices.

    Routers and adapters are; embeddings, heads, norms and biases are not.
    """
    if layout.is_expert(name):
        return len(shape) > 2 and not name.endswith("_bias")
    ends = tuple(f"{path}." for path in (layout.embed, layout.head) if path)
    is_inside = name.startswith(f"{layout.blocks}.") if layout.blocks else not name.startswith(ends)
    return len(shape) == 2 and is_inside
