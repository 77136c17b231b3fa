"""A quick estimate of a step's time and memory, by formulas: a roofline, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from ..parallel.mesh import AXES, FSDP_AXES, GRADIENT_AXES, Degrees
from ..parallel.pipeline.cut import cut_blocks, num_micro_batches, num_stages, stage_costs
from ..parallel.pipeline.grid import Grid, bubble_fraction, parse, schedule_grid
from ..parallel.tables import KEEPS_WEIGHTS
from .devices import Device

if TYPE_CHECKING:
    from ..recipe.schema import Recipe

EFFICIENCY = 0.6
"""share of a GPU's products a second that a block reaches, with all that is not a product"""
LINK_EFFICIENCY = 0.8
"""share of a link's bandwidth that collectives reach"""
LOSS_ROWS, LOSS_BYTES = 2048, 10
"""rows of logits at a time, and bytes of each logit: in bf16, in fp32, and its gradient"""
WITHOUT_COPIES = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}
"""strategy with copies -> the same without"""


@dataclass(frozen=True)
class Candidate:
    """One way to split a run.

    Attributes:
        strategy: of FSDP.
        micro_batch: rows a forward pass.
        seconds: of a step, estimated: of products, of communication that they do not hide, of
            waiting in the pipeline, and of the optimizer.
        memory_bytes: of a rank, by formula.
        simulated_bytes: peak of the worst rank; None: not simulated.
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
        """Of a step."""
        return (
            self.compute_seconds
            + self.exposed_seconds
            + self.bubble_seconds
            + self.optimizer_seconds
        )

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe, split in this way."""
        return changed(recipe, self.degrees, self.recompute, self.micro_batch)

    def overrides(self) -> list[str]:
        """Return `--set` values that do the same."""
        degrees = [f"parallel.{axis}={degree}" for axis, degree in self.degrees.by_axis.items()]
        return [
            *degrees,
            f'parallel.fsdp.strategy="{self.strategy}"',
            f'memory.recompute="{self.recompute}"',
            f"data.micro_batch={self.micro_batch}",
        ]


def changed(recipe: Recipe, degrees: Degrees, recompute: str, micro_batch: int) -> Recipe:
    """Return a recipe that is split in another way."""
    pipelining = recipe.parallel.pipelining.model_copy(
        update={"micro_batches": 0, "layers_per_stage": [], "modules_per_stage": [], "csv": ""}
    )
    fsdp = recipe.parallel.fsdp
    if degrees.replicate == 1:
        fsdp = fsdp.model_copy(
            update={"strategy": WITHOUT_COPIES.get(fsdp.strategy, fsdp.strategy)}
        )
    update = {**degrees.by_axis, "pipelining": pipelining, "fsdp": fsdp}
    parallel = recipe.parallel.model_copy(update=update)
    memory = recipe.memory.model_copy(update={"recompute": recompute})
    data = recipe.data.model_copy(update={"micro_batch": micro_batch})
    return recipe.model_copy(update={"parallel": parallel, "memory": memory, "data": data})


@dataclass(frozen=True)
class StepSizes:
    """Sizes that the formulas take.

    Attributes:
        block: parameters of one.
        ends: parameters of embedding and head together.
        state: bytes of optimizer state, a parameter.
        kept: elements a token that a block keeps for its backward pass, shared by tensor ranks.
        whole: of those that each of them keeps: what enters attention and the feed-forward layer.
    """

    config: Any
    block: int
    ends: int
    state: float
    kept: int
    whole: int

    @classmethod
    def of(cls, recipe: Recipe) -> StepSizes:
        """Return a recipe's; see Korthikanti et al. 2022, arXiv:2205.05198, section 4."""
        config: Any = recipe.model.with_vocab(recipe.vocab_size)
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
            state=_state_bytes(recipe),
            kept=2 * config.dim + 3 * heads + wide,
            whole=2 * config.dim,
        )


def _state_bytes(recipe: Recipe) -> float:
    """Return the bytes of the optimizer's state for one parameter, tried out on a small one."""
    import torch

    from ..optim.groups import parameter_groups

    weight = torch.nn.Parameter(torch.zeros(64, 64))
    config = recipe.optimizer.model_copy(update={"groups": []})
    optimizer = config.build(parameter_groups([("weight", weight)], config), weight.device)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = (each for state in optimizer.state.values() for each in state.values())
    return sum(each.nbytes for each in states if torch.is_tensor(each)) / weight.numel()


def estimate(
    recipe: Recipe, degrees: Degrees, model: StepSizes, device: Device, gpus_per_node: int
) -> Candidate:
    """Return how long a step takes and how much memory, by formulas: a quick first answer."""
    data = recipe.data
    share = data.global_batch // degrees.data
    passes = num_micro_batches(recipe.parallel.pipelining, data.micro_batch, share)
    rows = share // passes
    tokens = rows * data.seq_len // degrees.context
    again = recipe.memory.recompute == "full"
    config, stage, bubble, in_flight = model.config, model.config.n_layers, 0.0, 1
    if degrees.pipeline > 1:
        table = recipe.parallel.pipelining
        cut = cut_blocks(table, degrees.pipeline, config)
        stages = num_stages(table, degrees.pipeline)
        grid = _grid(table.schedule, degrees.pipeline, stages, passes)
        bubble = bubble_fraction(grid, stage_costs(cut, config))
        in_flight = _most_in_flight(grid)
        stage = max(len(cut.blocks(n)) for n in range(stages)) * (stages // degrees.pipeline)
    work = config.flops_per_token(data.seq_len) * data.global_batch * data.seq_len
    compute = work / degrees.world * (4 / 3 if again else 1) / (device.flops * EFFICIENCY)
    links = _Links(degrees, device, gpus_per_node)
    pieces = _pieces(recipe, degrees)
    weights = (stage * model.block + model.ends) / degrees.tensor
    exposed = (
        stage * passes * _tokens_seconds(tokens, model, degrees, links, 1.5 if again else 1.0)
        + links.seconds(FSDP_AXES, 4 * weights * (pieces - 1) / pieces) * (degrees.pipeline > 1)
        + 2 * passes * 2 * tokens * config.dim / degrees.tensor * links.per_byte(("pipeline",))
    )
    if degrees.pipeline == 1:
        gathers = passes * (1 if recipe.parallel.fsdp.strategy in KEEPS_WEIGHTS else 2)
        gathered = (2 * gathers + 4) * weights * (pieces - 1) / pieces
        exposed += max(0.0, links.seconds(FSDP_AXES, gathered) - compute)
    replicas = degrees.dp_cp // pieces
    ring = 2 * (replicas - 1) / replicas * 4 * weights / pieces
    along = ("replicate",) if pieces > 1 else GRADIENT_AXES
    exposed += max(0.0, links.seconds(along, ring) - compute / passes * 2 / 3)
    optimizer = weights / pieces * (3 * 4 + 2 * model.state) / device.memory_bandwidth
    return Candidate(
        degrees,
        recipe.parallel.fsdp.strategy,
        recipe.memory.recompute,
        rows,
        compute,
        exposed,
        (compute + exposed) * bubble / (1 - bubble),
        optimizer,
        _memory(recipe, degrees, model, weights, stage * in_flight, tokens, passes),
    )


def _tokens_seconds(
    tokens: int, model: StepSizes, degrees: Degrees, links: _Links, times: float
) -> float:
    """Return the time of a block's collectives along tensor and context, forward and backward."""
    tensor, context, config = degrees.tensor, degrees.context, model.config
    # Forward: two gathers and two reduce-scatters of hidden states; backward: the same.
    hidden = 8 * times * 2 * tokens * config.dim * (tensor - 1) / tensor
    # Keys and values are gathered, and their gradients reduced.
    pairs = 2 * 2 * tokens * config.n_kv_heads * config.head_width / min(tensor, config.n_kv_heads)
    across = 2 * times * pairs * (context - 1)
    return links.seconds(("tensor",), hidden) + links.seconds(("context",), across)


def _memory(
    recipe: Recipe,
    degrees: Degrees,
    model: StepSizes,
    weights: float,
    live_blocks: int,
    tokens: int,
    passes: int,
) -> int:
    """Return the bytes of a rank: weights, gradients, optimizer, activations and logits."""
    pieces = _pieces(recipe, degrees)
    held = weights / pieces * (4 + 4 + model.state)
    keeps = degrees.pipeline > 1 or recipe.parallel.fsdp.strategy in KEEPS_WEIGHTS
    gathered = weights * 2 if keeps else 2 * 2 * model.block / degrees.tensor
    if passes > 1 and pieces > 1:
        gathered += 4 * weights  # gradients are not reduced before the last micro batch
    one_block = 2 * tokens * (model.kept / degrees.tensor + model.whole)
    kept = 2 * tokens * model.config.dim / degrees.tensor
    activations = live_blocks * (kept if recipe.memory.recompute == "full" else one_block)
    working = 2 * one_block
    logits = min(LOSS_ROWS, tokens * degrees.context) * model.config.vocab / degrees.tensor
    return int(held + gathered + activations + working + LOSS_BYTES * logits)


def _pieces(recipe: Recipe, degrees: Degrees) -> int:
    """Return over how many ranks FSDP splits a parameter."""
    sharded = recipe.parallel.is_sharded(degrees)
    return degrees.fsdp if sharded else 1


class _Links:
    """How fast bytes pass along the axes of a mesh."""

    def __init__(self, degrees: Degrees, device: Device, gpus_per_node: int) -> None:
        self._degrees, self._device, self._node = degrees, device, gpus_per_node

    def seconds(self, axes: tuple[str, ...], size: float) -> float:
        """Return how long it takes a rank to send so many bytes along axes."""
        return size * self.per_byte(axes)

    def per_byte(self, axes: tuple[str, ...]) -> float:
        """Return the time of one byte.

        Of a ring through several nodes, its ranks in a node use their network cards together.
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
    """Return how many micro batches' activations a rank holds at most, of all its stages."""
    most = 1
    for row in grid:
        actions = [action for cell in row if cell and (action := parse(cell))]
        stages, now = len({action.stage for action in actions}), 0
        for action in actions:
            now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most = max(most, -(-now // stages))
    return most
