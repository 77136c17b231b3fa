"""The axes along which ranks share a run, and how many ranks each has. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Literal

from ..core.errors import Problem, RecipeError, nearest
from ..core.text.display import format_value


@dataclass(frozen=True)
class Axis:
    """A dimension of the device mesh.

    Attributes:
        name: key of its degree in `[parallel]`, and its field of `Degrees`.
        aliases: what `parallel.mesh` may call it besides.
        splits: what its ranks divide among them.
        reduces_gradients: whether its ranks compute with the same parameters, so that gradients are
            reduced over it; FSDP then shards parameters over it, unless it holds replicas.
        repeats_loss: whether all of its ranks compute the loss of the same tokens.
        pieces: of a sequence that each rank holds; 0: whole sequences.
        inside_nodes: whether it is worth its traffic only over the links inside a node.
        least_positions: of a sequence that keep a rank's GPU busy; plans with fewer are not tried.
        implementation: module in this package with a function `make_axis` (see `axis.AxisParts`);
            empty: FSDP, DDP and experts, which `plan` applies last.
    """

    name: str
    aliases: tuple[str, ...]
    splits: Literal["samples", "positions", "layers", "experts"]
    reduces_gradients: bool = False
    repeats_loss: bool = False
    pieces: int = 0
    inside_nodes: bool = False
    least_positions: int = 0
    implementation: str = ""


# Stages exchange hidden states alone, so that a pipeline can span slow links; tensor ranks exchange
# activations several times in each block, and are neighbours.
MESH = (
    Axis("pipeline", ("pp",), "layers", implementation="pipeline.split"),
    Axis("replicate", ("dp", "ddp"), "samples", reduces_gradients=True),
    Axis("shard", ("fsdp",), "samples", reduces_gradients=True),
    Axis(
        "context",
        ("cp",),
        "positions",
        reduces_gradients=True,
        # One from the first and one from the second half of a sequence: with causal attention late
        # positions cost more than early ones, and so every rank computes about the same.
        pieces=2,
        least_positions=1024,
        implementation="context.context",
    ),
    Axis(
        "tensor",
        ("tp",),
        "positions",
        repeats_loss=True,
        pieces=1,
        inside_nodes=True,
        implementation="tensor.tensor",
    ),
)
"""the axes of the device mesh, in order: ranks next to each other differ in the last one"""
EXPERT_MESH = (Axis("expert", ("ep",), "experts"), Axis("expert_tensor", ("etp",), "experts"))
"""the axes over which experts are placed; other parameters have no such axis"""

AXES = tuple(axis.name for axis in MESH)
EXPERT_AXES = tuple(axis.name for axis in EXPERT_MESH)
DATA_AXES = tuple(axis.name for axis in MESH if axis.splits == "samples")
GRADIENT_AXES = tuple(axis.name for axis in MESH if axis.reduces_gradients)
# Ranks of the context axis hold the same weights as each other, so FSDP shards over them too.
FSDP_AXES = tuple(name for name in GRADIENT_AXES if name != "replicate")
SEQUENCE_AXES = tuple(axis.name for axis in MESH if axis.pieces)


@dataclass(frozen=True)
class Degrees:
    """The number of ranks along each axis. In a recipe -1 stands for one that is not known yet."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """ranks of a pipeline stage over which the experts of a layer are divided"""
    expert_tensor: int = 1
    """ranks of a pipeline stage over which the width of each expert is divided"""

    def product(self, axes: Iterable[str]) -> int:
        """Return the number of ranks along some axes together."""
        return prod(getattr(self, axis) for axis in axes)

    @property
    def by_axis(self) -> dict[str, int]:
        """The degree of each axis of the device mesh, in order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.product(DATA_AXES)

    @property
    def dp_cp(self) -> int:
        """Ranks over which gradients are reduced: data parallel times context parallel."""
        return self.product(GRADIENT_AXES)

    @property
    def fsdp(self) -> int:
        """Ranks over which FSDP shards parameters, if the strategy shards them."""
        return self.product(FSDP_AXES)

    @property
    def model(self) -> int:
        """Ranks that hold different parts of the same model, experts left aside."""
        return self.world // self.dp_cp

    @property
    def loss_copies(self) -> int:
        """Ranks that compute the loss of the same tokens."""
        return self.product(axis.name for axis in MESH if axis.repeats_loss)

    @property
    def sequence(self) -> int:
        """Ranks that compute parts of the same sequence."""
        return self.product(SEQUENCE_AXES)

    @property
    def sequence_pieces(self) -> int:
        """Pieces of equal length into which a sequence is cut."""
        return prod(
            getattr(self, axis.name) * axis.pieces
            for axis in MESH
            if axis.pieces and getattr(self, axis.name) > 1
        )

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are divided."""
        return self.expert * self.expert_tensor

    @property
    def world(self) -> int:
        """The world size."""
        return self.product(AXES)

    def is_known(self, *axes: str) -> bool:
        """Return whether none of the axes waits for the world size."""
        return all(getattr(self, axis) != -1 for axis in axes)

    @property
    def known(self) -> Degrees:
        """These degrees with 1 for each that is not known yet."""
        return replace(self, **{axis: 1 for axis in AXES if not self.is_known(axis)})

    def fill(self, world: int) -> Degrees:
        """Return these degrees with what is left of the world size for the one of -1."""
        left = world // max(1, self.known.world)
        return replace(self, **{axis: left for axis in AXES if not self.is_known(axis)})

    def resolve(self, world: int) -> Degrees:
        """Return what `fill` returns.

        Raises:
            RecipeError: the degrees do not multiply to the world size.
        """
        found = self.fill(world)
        if found.world != world:
            given = (f"{axis} {n}" for axis, n in self.by_axis.items() if n != 1)
            message = f"{' x '.join(given) or 'one rank'} does not make {world} ranks"
            hint = "set one degree to -1 to take what is left over"
            raise RecipeError([Problem(message, key="parallel", hint=hint)])
        return found

    def coordinate(self, rank: int) -> Degrees:
        """Return the coordinate of a rank on each axis."""
        # Experts have a mesh of their own on the ranks of a stage: consecutive ranks, which are
        # neighbours on the innermost axes, divide the experts of a layer.
        among = rank % self.expert_ranks
        place = dict(zip(EXPERT_AXES, divmod(among, self.expert_tensor), strict=True))
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return Degrees(**place)

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        at = self.coordinate(rank)
        return at.replicate * self.shard + at.shard


def expert_grid(degrees: Degrees, *, sharded: bool) -> tuple[int, int]:
    """Return how many ranks replicate, and how many shard, each share of the experts."""
    # Tensor ranks count as ranks that shard, because the tensor axis does not split experts. The
    # ranks that divide experts are taken from them first; what is left shards each share.
    inner = degrees.fsdp * degrees.tensor if sharded else 1
    shard = inner // gcd(inner, degrees.expert_ranks)
    return degrees.dp_cp * degrees.tensor // degrees.expert_ranks // shard, shard


_WORDS = {word: axis.name for axis in (*MESH, *EXPERT_MESH) for word in (axis.name, *axis.aliases)}
LARGEST_DEGREE = 2**20


def parse_mesh(text: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Parse `parallel.mesh`, such as "dp:2,fsdp:-1,tp:4".

    Args:
        text: `WORD:DEGREE` and commas.

    Returns:
        the degree of every axis, 1 where the text does not name it; faults, each with a hint.
    """
    degrees: dict[str, int] = {}
    faults = []
    for entry in text.split(","):
        word, _, number = (part.strip() for part in entry.partition(":"))
        axis = _WORDS.get(word.lower())
        if axis is None:
            faults.append(_unknown_axis(word, text))
        elif axis in degrees:
            faults.append((f"{format_value(entry.strip())} gives {axis} a second time", ""))
        elif not re.fullmatch(r"-1|[0-9]{1,7}", number) or not -1 <= int(number) <= LARGEST_DEGREE:
            message = f"expected a degree of {axis}, such as {word}:2, got {format_value(number)}"
            faults.append((message, "-1 takes what is left over"))
        else:
            degrees[axis] = int(number)
    return {axis: degrees.get(axis, 1) for axis in (*AXES, *EXPERT_AXES)}, faults


def _unknown_axis(word: str, text: str) -> tuple[str, str]:
    if not word:
        message = f"expected WORD:DEGREE and commas, got {format_value(text)}"
        return message, 'such as "dp:2,fsdp:-1,tp:4"'
    known = nearest(word.lower(), _WORDS) or f"known: {', '.join(_WORDS)}"
    return f"no axis of the mesh is called {format_value(word)}", known
