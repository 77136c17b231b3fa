"""How fast a plan would train on a GPU, in an engine as well tuned as the published ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..recipe.schema import Recipe
from .devices import DEVICES
from .roofline import estimate
from .step_sizes import StepSizes


@dataclass(frozen=True)
class Speed:
    """The estimated speed of a run.

    Attributes:
        gpu: the GPU, a key of `DEVICES`.
        step_seconds: the time of a step.
        step_parts: the components of that time in seconds, by name.
        tokens_per_second: tokens that one GPU trains on in a second.
        mfu: model FLOP/s utilization, 0 to 1, without recomputation (PaLM, arXiv:2204.02311).
    """

    gpu: str
    step_seconds: float
    step_parts: dict[str, float]
    tokens_per_second: float
    mfu: float

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self)

    def describe(self) -> str:
        """Return the speed in two lines."""
        shares = sorted(self.step_parts.items(), key=lambda part: -part[1])
        text = ", ".join(f"{part / self.step_seconds:.0%} {name}" for name, part in shares if part)
        return (
            f"On {self.gpu}, if tuned as well as the fastest published engines: "
            f"{self.step_seconds:.3g} s a step, {self.tokens_per_second:,.0f} tokens/s a GPU, "
            f"MFU {self.mfu:.1%}\n({text})"
        )


def estimate_speed(recipe: Recipe, ranks: int, gpu: str, gpus_per_node: int) -> Speed | None:
    """Estimate the speed of a recipe's plan; None for a model that is not one of the zoo's.

    Args:
        recipe: a recipe that is validated for that many ranks.
        ranks: the world size.
        gpu: a key of `DEVICES`.
        gpus_per_node: the number of ranks in a node.
    """
    if not recipe.task.needs_language_model:
        return None
    recipe = recipe.for_largest_split()
    sizes, device = StepSizes.of(recipe), DEVICES[gpu]
    degrees = recipe.parallel.degrees.resolve(ranks)
    found = estimate(recipe, degrees, sizes, device, gpus_per_node)
    positions = recipe.data.global_batch * recipe.task.positions(recipe.data)
    per_second = positions / ranks / found.seconds
    # Two operations a weight forward, two for the gradient of the input, and two for that of the
    # weight, which frozen weights do not have.
    blocks = 2 * (3 - sizes.is_frozen) * (sizes.dense + sizes.routed)
    mfu = per_second * (blocks + 6 * (sizes.head + sizes.attention)) / device.flops
    return Speed(gpu, found.seconds, found.parts(), per_second, mfu)
