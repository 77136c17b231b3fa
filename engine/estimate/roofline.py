"""A quick estimate of a step's time and memory, by formulas: a roofline, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ..optim.parameters import parameter_groups
from ..optim.tables import OptimizerConfig
from ..parallel.mesh import AXES, FSDP_AXES, GRADIENT_AXES, Degrees
from ..parallel.pipeline.cut import cut_blocks, num_micro_batches, num_stages, stage_costs
from ..parallel.pipeline.grid import Grid, bubble_fraction, parse, schedule_grid
from ..parallel.tables import Memory, Parallel
from .devices import Device

if TYPE_CHECKING:
    from ..data.tables import Data

EFFICIENCY = 0.6
"""share of the peak FLOPs that a block reaches, including its operations that are not matmuls"""
LINK_EFFICIENCY = 0.8
"""share of a link's peak bandwidth that collectives reach"""
LOSS_ROWS, LOSS_BYTES = 2048, 10
"""logit rows computed at once, and bytes a logit: bf16 and fp32 copies and the fp32 gradient"""


@dataclass(frozen=True)
class Candidate:
    """One way to split a run over ranks, with its estimated time and memory.

    Attributes:
        degrees: the size of each mesh axis.
        strategy: the FSDP strategy.
        recompute: the value of `memory.recompute`.
        micro_batch: rows of a forward pass.
        compute_seconds: time of the matmuls in a step.
        exposed_seconds: communication time that computation does not hide.
        bubble_seconds: time in which a rank waits in the pipeline.
        optimizer_seconds: time of the optimizer step.
        memory_bytes: memory of a rank by formula.
        simulated_bytes: simulated peak of the worst rank, or None if it was not simulated.
    """

    degrees: Degrees
    strategy: str
    recompute: str
    micro_batch: int
    compute_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    optimizer_seconds: float
    memory_bytes: int
    simulated_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """The estimated time of a step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return the components of the step time in seconds, by name."""
        return {
            "products": self.compute_seconds,
            "communication that products do not hide": self.exposed_seconds,
            "pipeline bubble": self.bubble_seconds,
            "the optimizer": self.optimizer_seconds,
        }

    def overrides(self) -> list[str]:
        """Return the `--set` values that apply this split to a recipe."""
        degrees = [f"parallel.{axis}={degree}" for axis, degree in self.degrees.by_axis.items()]
        return [
            *degrees,
            f'parallel.fsdp.strategy="{self.strategy}"',
            f'memory.recompute="{self.recompute}"',
            f"data.micro_batch={self.micro_batch}",
        ]


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a model that the formulas use.

    Attributes:
        config: the model's config.
        block: the parameters of a block.
        ends: the parameters of embedding and head together.
        width: bytes of a parameter, and of a gradient.
        state: bytes of optimizer state a parameter.
        saved: activation elements a token that a block saves for backward, summed over the ranks of
            the tensor axis.
        replicated: activation elements a token that every rank of the tensor axis saves: the inputs
            of attention and of the feed-forward layer.
    """

    config: Any
    block: int
    ends: int
    width: int
    state: float
    saved: int
    replicated: int

    @classmethod
    def of(cls, config: Any, optimizer: OptimizerConfig, width: int) -> StepSizes:
        """Return the sizes of a model; activations as in section 4 of arXiv:2205.05198."""
        shapes = config.parameter_shapes()
        start = f"{config.layout.blocks}."
        blocks = sum(prod(shape) for name, shape in shapes.items() if name.startswith(start))
        heads = (config.n_heads + config.n_kv_heads) * config.head_width
        moe = getattr(config, "moe", None)
        wide = 3 * config.ffn_dim if moe is None else moe.saved_activations(config.dim)
        return cls(
            config,
            block=blocks // config.n_layers,
            ends=sum(map(prod, shapes.values())) - blocks,
            width=width,
            state=_state_bytes(optimizer),
            saved=2 * config.dim + 3 * heads + wide,
            replicated=2 * config.dim,
        )


def _state_bytes(config: OptimizerConfig) -> float:
    """Return the bytes of optimizer state a parameter, measured by a step on a small weight."""
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    config = config.model_copy(update={"groups": []})
    optimizer = config.build(parameter_groups([("weight", weight)], config), weight.device)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if torch.is_tensor(value)) / weight.numel()


def estimate(
    degrees: Degrees,
    parallel: Parallel,
    memory: Memory,
    data: Data,
    model: StepSizes,
    device: Device,
    gpus_per_node: int,
) -> Candidate:
    """Estimate the time of a step and the memory of a rank by formulas, without a simulation."""
    share = data.global_batch // degrees.data
    passes = num_micro_batches(parallel.pipelining, data.micro_batch, share)
    rows = share // passes
    tokens = rows * data.seq_len // degrees.context
    recomputes = memory.recompute == "full"
    resharding = parallel.fsdp.resharding(degrees.fsdp)
    keeps_weights = not resharding
    config, stage, bubble, in_flight = model.config, model.config.n_layers, 0.0, 1
    if degrees.pipeline > 1:
        table = parallel.pipelining
        cut = cut_blocks(table, degrees.pipeline, config)
        stages = num_stages(table, degrees.pipeline)
        grid = _grid(table.schedule, degrees.pipeline, stages, passes)
        bubble = bubble_fraction(grid, stage_costs(cut, config))
        in_flight = _most_in_flight(grid)
        stage = max(len(cut.blocks(n)) for n in range(stages)) * (stages // degrees.pipeline)
    work = config.flops_per_token(data.seq_len) * data.global_batch * data.seq_len
    compute = work / degrees.world * (4 / 3 if recomputes else 1) / (device.flops * EFFICIENCY)
    links = _Links(degrees, device, gpus_per_node)
    pieces = degrees.fsdp if parallel.is_sharded(degrees) else 1
    weights = (stage * model.block + model.ends) / degrees.tensor
    exposed = (
        stage * passes * _tokens_seconds(tokens, model, degrees, links, 1.5 if recomputes else 1.0)
        + links.seconds(FSDP_AXES, 4 * weights * (pieces - 1) / pieces) * (degrees.pipeline > 1)
        + 2 * passes * 2 * tokens * config.dim / degrees.tensor * links.per_byte(("pipeline",))
    )
    if degrees.pipeline == 1:
        gathers = passes * (1 if keeps_weights else 2)
        gathered = (2 * gathers + 4) * weights * (pieces - 1) / pieces
        exposed += max(0.0, links.seconds(FSDP_AXES, gathered) - compute)
    replicas = degrees.dp_cp // pieces
    ring = 2 * (replicas - 1) / replicas * 4 * weights / pieces
    along = ("replicate",) if pieces > 1 else GRADIENT_AXES
    exposed += max(0.0, links.seconds(along, ring) - compute / passes * 2 / 3)
    optimizer = weights / pieces * (3 * model.width + 2 * model.state) / device.memory_bandwidth
    return Candidate(
        degrees,
        parallel.fsdp.strategy,
        memory.recompute,
        rows,
        compute,
        exposed,
        (compute + exposed) * bubble / (1 - bubble),
        optimizer,
        _memory(
            degrees,
            model,
            weights,
            pieces,
            stage * in_flight,
            tokens,
            keeps_weights=degrees.pipeline > 1 or keeps_weights,
            keeps_gradients=passes > 1 and pieces > 1,
            recomputes=recomputes,
        )
        # Between the passes a rank keeps one of the pieces that FSDP reshards to, in bf16.
        + (0 if isinstance(resharding, bool) else int(2 * weights / resharding)),
    )


def _tokens_seconds(
    tokens: int, model: StepSizes, degrees: Degrees, links: _Links, times: float
) -> float:
    """Return the seconds of a block's tensor and context collectives, forward and backward."""
    tensor, context, config = degrees.tensor, degrees.context, model.config
    # Forward: two gathers and two reduce-scatters of hidden states; backward: the same.
    hidden = 8 * times * 2 * tokens * config.dim * (tensor - 1) / tensor
    # Keys and values are gathered, and their gradients reduced.
    pairs = 2 * 2 * tokens * config.n_kv_heads * config.head_width / min(tensor, config.n_kv_heads)
    across = 2 * times * pairs * (context - 1)
    return links.seconds(("tensor",), hidden) + links.seconds(("context",), across)


def _memory(
    degrees: Degrees,
    model: StepSizes,
    weights: float,
    pieces: int,
    live_blocks: int,
    tokens: int,
    *,
    keeps_weights: bool,
    keeps_gradients: bool,
    recomputes: bool,
) -> int:
    """Return the bytes of a rank: weights, gradients, optimizer, activations and logits."""
    held = weights / pieces * (2 * model.width + model.state)
    gathered = weights * 2 if keeps_weights else 2 * 2 * model.block / degrees.tensor
    if keeps_gradients:
        gathered += 4 * weights  # gradients are not reduced before the last micro batch
    one_block = 2 * tokens * (model.saved / degrees.tensor + model.replicated)
    inputs = 2 * tokens * model.config.dim / degrees.tensor
    activations = live_blocks * (inputs if recomputes else one_block)
    logits = min(LOSS_ROWS, tokens * degrees.context) * model.config.vocab / degrees.tensor
    return int(held + gathered + activations + 2 * one_block + LOSS_BYTES * logits)


class _Links:
    """The bandwidth of process groups along the axes of a mesh."""

    def __init__(self, degrees: Degrees, device: Device, gpus_per_node: int) -> None:
        self._degrees, self._device, self._node = degrees, device, gpus_per_node

    def seconds(self, axes: tuple[str, ...], size: float) -> float:
        """Return the time in which a rank sends `size` bytes along axes."""
        return size * self.per_byte(axes)

    def per_byte(self, axes: tuple[str, ...]) -> float:
        """Return the seconds that one byte takes.

        A ring that crosses nodes uses the network cards of all its ranks in a node together.
        """
        inner = prod(getattr(self._degrees, axis) for axis in AXES[AXES.index(axes[-1]) + 1 :])
        ranks = prod(getattr(self._degrees, axis) for axis in axes)
        bandwidth = self._device.node_bandwidth
        if inner * ranks > self._node:
            together = max(1, self._node // inner)
            bandwidth = min(bandwidth, together * self._device.network_bandwidth)
        return 1 / (bandwidth * LINK_EFFICIENCY)


@lru_cache(256)
def _grid(schedule: str, ranks: int, stages: int, micro_batches: int) -> Grid:
    return schedule_grid(schedule, ranks, stages, micro_batches)


def _most_in_flight(grid: Grid) -> int:
    """Return the largest number of micro batches in flight on a rank, averaged over its stages."""
    most = 1
    for row in grid:
        actions = [action for cell in row if cell and (action := parse(cell))]
        stages, now = len({action.stage for action in actions}), 0
        for action in actions:
            now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, -(-now // stages))
    return most
