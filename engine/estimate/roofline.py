"""A quick estimate of a step's time and memory, by formulas: a roofline, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..parallel.mesh import Degrees, expert_grid
from ..parallel.pipeline.cut import cut_blocks, num_micro_batches, num_stages, stage_costs
from ..parallel.pipeline.grid import Grid, bubble_fraction, parse, schedule_grid
from ..recipe.schema import Recipe
from .devices import CLOCK, Clock, Device
from .step_sizes import StepSizes
from .work import Links, StepWork, messages_of, products_of, recomputed_share

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
        compute_seconds: time of a step's products, attention and what is between them.
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
            "computation": self.compute_seconds,
            "communication that computation does not hide": self.exposed_seconds,
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


def measure(
    recipe: Recipe, degrees: Degrees, model: StepSizes, device: Device, gpus_per_node: int
) -> tuple[StepWork, int]:
    """Return the work of a rank in a step, and the blocks whose activations it holds at once."""
    parallel, memory, data = recipe.parallel, recipe.memory, recipe.data.largest
    share = data.global_batch // degrees.data
    passes = num_micro_batches(parallel.pipelining, data.micro_batch, share)
    length = recipe.task.positions(data)
    positions = share // passes * length // degrees.context
    total = data.global_batch * length / degrees.world
    stage, bubble, in_flight = model.config.num_blocks, 0.0, 1
    if degrees.pipeline > 1:
        table = parallel.pipelining
        cut = cut_blocks(table, degrees.pipeline, model.config)
        stages = num_stages(table, degrees.pipeline)
        grid = _grid(table.schedule, degrees.pipeline, stages, passes)
        bubble = bubble_fraction(grid, stage_costs(cut, model.config))
        in_flight = _most_in_flight(grid)
        stage = max(len(cut.held_blocks(n)) for n in range(stages)) * (stages // degrees.pipeline)
    again, attention_again = recomputed_share(memory)
    dense, experts = model.held(stage, degrees)
    pieces, shards = _shards(recipe, degrees)
    links = Links(degrees, device, gpus_per_node)
    sizes = {"blocks": stage, "passes": passes, "positions": positions, "recomputed": again}
    is_again = float(memory.recompute != "none")
    # Each element that a block saves is written in two bytes, and once more if it is recomputed.
    moved = 2 * model.config.num_blocks * (model.saved + model.replicated) * (1 + is_again / 3)
    work = StepWork(
        products=tuple(products_of(model, positions, total, degrees, again)),
        attention_flops=2 * (3 + attention_again) * total * model.attention,
        moved_bytes=total * (moved + LOSS_BYTES * model.config.head_rows),
        launches=stage * passes,
        messages=tuple(messages_of(model, parallel, degrees, links, **sizes)),
        bubble=bubble,
        optimizer_bytes=(dense / pieces + experts / shards) * (3 * model.width + 2 * model.state),
        is_compiled=recipe.compile.enabled,
    )
    return work, stage * in_flight


def estimate(
    recipe: Recipe,
    degrees: Degrees,
    model: StepSizes,
    device: Device,
    gpus_per_node: int,
    clock: Clock = CLOCK,
) -> Candidate:
    """Estimate the time of a step and the memory of a rank by formulas, without a simulation."""
    work, live_blocks = measure(recipe, degrees, model, device, gpus_per_node)
    compute, exposed, waiting, update = work.seconds(device, clock)
    data = recipe.data.largest
    share = data.global_batch // degrees.data
    passes = num_micro_batches(recipe.parallel.pipelining, data.micro_batch, share)
    return Candidate(
        degrees,
        recipe.parallel.fsdp.strategy,
        recipe.memory.recompute,
        share // passes,
        compute,
        exposed,
        waiting,
        update,
        _memory(recipe, degrees, model, live_blocks, share // passes, passes),
    )


def _shards(recipe: Recipe, degrees: Degrees) -> tuple[int, int]:
    """Return over how many ranks weights are sharded, and over how many each share of experts."""
    is_sharded = recipe.parallel.is_sharded(degrees)
    return degrees.fsdp if is_sharded else 1, expert_grid(degrees, sharded=is_sharded)[1]


def _memory(
    recipe: Recipe, degrees: Degrees, model: StepSizes, live_blocks: int, rows: int, passes: int
) -> int:
    """Return the bytes of a rank: weights, gradients, optimizer, activations and logits."""
    length = recipe.task.positions(recipe.data.largest)
    positions, fsdp = rows * length // degrees.context, recipe.parallel.fsdp
    stage = -(-model.config.num_blocks // degrees.pipeline)
    dense, experts = model.held(stage, degrees)
    pieces, shards = _shards(recipe, degrees)
    resharding = fsdp.resharding(degrees.fsdp)
    held = (dense / pieces + experts / shards) * (2 * model.width + model.state)
    whole = dense + experts
    block = model.block / degrees.tensor + model.experts / degrees.expert_ranks
    gathered = 2 * whole if degrees.pipeline > 1 or not resharding else 2 * 2 * block
    if not isinstance(resharding, bool):
        # Between the passes a rank keeps one of the pieces that FSDP reshards to, in bf16.
        gathered += 2 * whole / resharding
    if passes > 1 and pieces > 1 and fsdp.reduce_every == "step" and not model.is_frozen:
        gathered += 4 * whole  # gradients are not reduced before the last micro batch
    one_block = 2 * positions * (model.saved / degrees.tensor + model.replicated)
    inputs = 2 * positions * model.config.dim / degrees.tensor
    kept = 1.0 - max(recomputed_share(recipe.memory))
    if recipe.memory.recompute == "selective":
        kept = kept / 2 + 0.25  # products are kept, what is between them is not
    activations = live_blocks * (inputs + kept * (one_block - inputs))
    logits = min(LOSS_ROWS, positions * degrees.context) * model.config.vocab / degrees.tensor
    return int(held + gathered + activations + 2 * one_block + LOSS_BYTES * logits)


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
