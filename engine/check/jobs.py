"""What ranks are asked to compute, and what they answer. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..recipe.schema import Recipe


class PlanJob(NamedTuple):
    """What a rank computes.

    Attributes:
        recipe: the recipe, adapted and shrunk.
        reference: file of the reference.
        writes: whether the file is written, else it is compared with.
        steps: how many optimizer steps.
        hides_labels: whether some labels are left out, so that ranks count unequal numbers.
    """

    recipe: Recipe
    reference: str
    writes: bool = False
    steps: int = 2
    hides_labels: bool = False


class Distance(NamedTuple):
    """How far a gradient is from the reference.

    Attributes:
        relative: the largest difference of two elements, over the largest element.
        squared: the sum of squared differences.
        total: the sum of squares of the reference.
    """

    relative: float
    squared: float
    total: float


@dataclass(frozen=True)
class StepDistances:
    """How far one step is from the reference, on one rank or on all.

    Attributes:
        layers: how many layers of experts there are.
        routing: the routers whose experts got other numbers of tokens.
        loss: relative difference of the losses, the larger one of task and total loss.
        gradients: the distance of each parameter by name, in the order of the model; of a rank,
            those that it has a part of.
    """

    layers: int
    routing: list[str]
    loss: float
    gradients: Mapping[str, Distance]


COMPUTE = f"{__package__}.rank:run_job"
"""module and name of the function that does a `PlanJob` on a rank"""
