"""The work of a rank in one step by formulas, and the time that it takes at a clock's rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2, prod
from typing import TYPE_CHECKING

from ..parallel.mesh import AXES, FSDP_AXES, GRADIENT_AXES, Degrees, expert_grid
from ..parallel.tables import HALF, Memory, Parallel
from .devices import CLOCK, Clock, Device
from .groups import INSIDE, link_among, members_of

if TYPE_CHECKING:
    from ...model_zoo.layers.configs import MoESettings
    from .step_sizes import StepSizes

WORD = 2
"""bytes of an activation and of a gathered weight: bf16"""
NARROW = 1
"""bytes of an activation that is gathered in float8"""


@dataclass(frozen=True)
class Products:
    """Matrix products of a step that have the same shape.

    Attributes:
        flops: FLOPs of a rank in a step.
        rows: positions of one product.
        width: the smaller size of the rank's part of the weight.
    """

    flops: float
    rows: float
    width: float


@dataclass(frozen=True)
class Message:
    """The bytes that a rank sends over one kind of link in a step.

    Attributes:
        size: bytes of a ring's link.
        bandwidth: bytes per second of the data sheet.
        is_inside: whether the link is inside of a node.
        calls: collectives in a step.
        ranks: the size of the process group.
        hides: "computation" can hide it; "products": asynchronous tensor parallelism can; "".
    """

    size: float
    bandwidth: float
    is_inside: bool
    calls: float
    ranks: int
    hides: str = ""

    def seconds(self, clock: Clock) -> float:
        """Return the time of the collectives."""
        share = clock.node_share if self.is_inside else clock.network_share
        latency = clock.node_latency if self.is_inside else clock.network_latency
        return self.size / (self.bandwidth * share) + self.calls * latency * log2(self.ranks)


@dataclass(frozen=True)
class StepWork:
    """What a rank computes, moves and sends in one step.

    Attributes:
        products: the matrix products, recomputed ones included.
        attention_flops: FLOPs of attention, recomputed ones included.
        moved_bytes: bytes of activations that operations between products read and write.
        launches: passes of a micro batch through a block.
        messages: the collectives.
        bubble: share of the time in which a rank waits in the pipeline.
        optimizer_bytes: bytes that the optimizer reads and writes.
        is_compiled: whether blocks are compiled.
    """

    products: Sequence[Products]
    attention_flops: float
    moved_bytes: float
    launches: float
    messages: Sequence[Message]
    bubble: float
    optimizer_bytes: float
    is_compiled: bool

    def compute_seconds(self, device: Device, clock: Clock = CLOCK) -> float:
        """Return the time of products, attention and the operations between them."""
        seconds = self.attention_flops / clock.attention_share
        for each in self.products:
            edges = 1 + clock.half_size * (1 / each.rows + 1 / each.width)
            seconds += each.flops * edges / clock.product_share
        traffic = clock.compiled_traffic if self.is_compiled else clock.eager_traffic
        launch = clock.compiled_launch if self.is_compiled else clock.eager_launch
        seconds = seconds / device.flops + traffic * self.moved_bytes / device.memory_bandwidth
        launching = launch * self.launches
        # A CPU launches ahead of the GPU, but not past a stage that waits for its neighbour.
        return seconds + launching if self.bubble else max(seconds, launching)

    def exposed_seconds(self, compute: float, clock: Clock = CLOCK) -> float:
        """Return the time of collectives that `compute` seconds of computation do not hide."""
        exposed, hidden = 0.0, 0.0
        for message in self.messages:
            seconds = message.seconds(clock)
            if message.hides == "computation":
                hidden += seconds
            else:
                exposed += seconds * (clock.async_exposed if message.hides else 1.0)
        return exposed + max(clock.exposed * hidden, hidden - compute)

    def seconds(self, device: Device, clock: Clock = CLOCK) -> tuple[float, float, float, float]:
        """Return the time of computation, exposed communication, the bubble and the optimizer."""
        compute = self.compute_seconds(device, clock)
        exposed = self.exposed_seconds(compute, clock)
        waiting = (compute + exposed) * self.bubble / (1 - self.bubble)
        return compute, exposed, waiting, self.optimizer_bytes / device.memory_bandwidth


def recomputed_share(memory: Memory) -> tuple[float, float]:
    """Return the share of forward products, and of forward attention, that is computed again."""
    if memory.recompute == "selective":
        keep = memory.recompute_keep
        products = 0.0 if "mm" in keep else 0.5 if HALF in keep else 1.0
        return products, float("attention" not in keep)
    shares = {
        "full": 1.0,
        "every_n": 1 / memory.recompute_interval,
        "budget": 1 - memory.recompute_budget,
    }
    return (shares.get(memory.recompute, 0.0),) * 2


def products_of(
    model: StepSizes, positions: int, total: float, degrees: Degrees, recomputed: float
) -> Iterator[Products]:
    """Yield the products of a rank's step.

    Args:
        model: the sizes of the model.
        positions: positions of a forward pass of the rank.
        total: positions of a step over the world size.
        degrees: the size of each mesh axis.
        recomputed: the share of forward products that is computed again.
    """
    # Two operations a weight and position in the forward pass, two for the gradient of the input,
    # and two for the gradient of the weight, which frozen weights do not have.
    times = (2 if model.is_frozen else 3) + recomputed
    dim = model.config.dim
    yield Products(2 * times * total * model.dense, positions, dim / degrees.tensor)
    yield Products(2 * 3 * total * model.head, positions, dim)
    if moe := model.moe:
        rows = (
            positions * moe.experts_per_token * degrees.expert / (moe.num_experts * degrees.tensor)
        )
        width = moe.expert_ffn_dim / degrees.expert_tensor
        yield Products(2 * times * total * model.routed, rows, width)


class Links:
    """The process groups of a mesh: where they are, and how fast their links are."""

    def __init__(self, degrees: Degrees, device: Device, gpus_per_node: int) -> None:
        self._degrees, self._device, self._node = degrees, device, gpus_per_node

    def ring(
        self, axes: tuple[str, ...], size: float, calls: float, hides: str = ""
    ) -> Iterator[Message]:
        """Yield a message of a ring along axes, if it has more than one rank.

        A ring that crosses nodes uses the network cards of all its ranks in a node together.
        """
        inner = prod(getattr(self._degrees, axis) for axis in AXES[AXES.index(axes[-1]) + 1 :])
        ranks = self._degrees.product(axes)
        is_inside = inner * ranks <= self._node
        if ranks > 1 and size:
            together = max(1, min(ranks, self._node // inner))
            yield self._message(size, is_inside, together, calls, ranks, hides)

    def experts(self, size: float, moe: MoESettings, calls: float) -> Iterator[Message]:
        """Yield the exchange of tokens among the ranks that divide the experts.

        A token that takes several experts of a rank goes there once, and once to each node, whose
        ranks pass it on (as DeepEP does, https://github.com/deepseek-ai/DeepEP).

        Args:
            size: bytes of all tokens, each counted once.
            moe: the settings of the experts.
            calls: exchanges in a step.
        """
        ranks, taken = self._degrees.expert, moe.experts_per_token
        # Experts of some groups alone are open to a token (arXiv:2412.19437, section 2.1.2).
        share = moe.groups_per_token / moe.groups
        members = members_of(self._degrees, ("expert",), 0)
        near = sum(link_among((0, each), self._node) == INSIDE for each in members)
        for places, is_inside in ((ranks * (near > 1), True), (ranks // near, False)):
            if places > 1:
                # The expected number of other places among those of `taken` random experts.
                reached = max(1.0, places * share)
                copies = (places - 1) / places * reached * (1 - (1 - 1 / reached) ** taken)
                yield self._message(size * copies, is_inside, 1, calls, ranks, "")

    def expert_ring(self, size: float, ranks: int, calls: float) -> Iterator[Message]:
        """Yield the gathers and sums of experts over the ranks that shard one share of them."""
        if ranks > 1:
            stride = self._degrees.expert_ranks
            is_inside = stride * ranks <= self._node
            together = max(1, self._node // stride)
            yield self._message(size, is_inside, together, calls, ranks, "computation")

    def _message(
        self, size: float, is_inside: bool, together: int, calls: float, ranks: int, hides: str
    ) -> Message:
        bandwidth = self._device.node_bandwidth
        if not is_inside:
            bandwidth = min(bandwidth, together * self._device.network_bandwidth)
        return Message(size, bandwidth, is_inside, calls, ranks, hides)


def messages_of(
    model: StepSizes,
    parallel: Parallel,
    degrees: Degrees,
    links: Links,
    *,
    blocks: int,
    passes: int,
    positions: int,
    recomputed: float,
) -> Iterator[Message]:
    """Yield the collectives of a rank's step.

    Args:
        model: the sizes of the model.
        parallel: the recipe's table.
        degrees: the size of each mesh axis.
        links: the links of the mesh.
        blocks: blocks that the rank holds.
        passes: micro batches of a step.
        positions: positions of a forward pass of the rank, the same on all ranks of its tensor
            group.
        recomputed: the share of forward passes that is computed again.
    """
    tensor, config, times = degrees.tensor, model.config, 2 + recomputed
    hidden = WORD * positions * config.dim
    # Two gathers and two reduce-scatters of hidden states in a forward pass, the same backward. In
    # float8 go the forward gathers.
    narrow = 2 * (WORD - NARROW) / WORD * (1 + recomputed) if model.gathers_float8 else 0.0
    size = (4 * times - narrow) * hidden * (tensor - 1) / tensor * blocks * passes
    hides = "products" if parallel.async_tensor else ""
    yield from links.ring(("tensor",), size, 4 * times * blocks * passes, hides)
    # Keys and values are gathered, and their gradients reduced.
    heads = config.n_kv_heads / min(tensor, config.n_kv_heads)
    pairs = 2 * WORD * positions * heads * config.head_width
    size = times * pairs * (degrees.context - 1) * blocks * passes
    yield from links.ring(("context",), size, times * blocks * passes)
    if moe := model.moe:
        # There and back again in each pass.
        calls = 2 * times * model.expert_blocks * blocks * passes
        yield from links.experts(calls * hidden / tensor, moe, calls)
    if degrees.pipeline > 1:
        size = 2 * passes * hidden / tensor * max(1, parallel.pipelining.stages_per_rank)
        yield from links.ring(("pipeline",), size, 2 * passes)
    yield from _weight_messages(model, parallel, degrees, links, blocks, passes)


def _weight_messages(
    model: StepSizes, parallel: Parallel, degrees: Degrees, links: Links, blocks: int, passes: int
) -> Iterator[Message]:
    """Yield the gathers of weights and the reductions of their gradients."""
    dense, experts = model.held(blocks, degrees)
    is_sharded = parallel.is_sharded(degrees)
    pieces = degrees.fsdp if is_sharded else 1
    in_pipeline = degrees.pipeline > 1
    times = 1 if in_pipeline else passes
    gathers = times * (1 if in_pipeline or not parallel.fsdp.resharding(degrees.fsdp) else 2)
    sums = times if parallel.fsdp.reduce_every == "micro_batch" else 1
    gradients = 0 if model.is_frozen else sums * model.reduce_width
    copies, shards = expert_grid(degrees, sharded=is_sharded)
    size, calls = WORD * gathers + gradients, blocks * (gathers + sums)
    if pieces > 1:
        ring = size * dense * (pieces - 1) / pieces
        yield from links.ring(FSDP_AXES, ring, calls, "computation")
    if experts:
        yield from links.expert_ring(size * experts * (shards - 1) / shards, shards, calls)
        whole = 2 * gradients * experts / shards * (copies - 1) / copies
        yield from links.expert_ring(whole, copies, blocks * sums)
    replicas = degrees.dp_cp // pieces
    if replicas > 1:
        along = ("replicate",) if pieces > 1 else GRADIENT_AXES
        ring = 2 * gradients * (replicas - 1) / replicas * dense / pieces
        yield from links.ring(along, ring, blocks * sums, "computation")
