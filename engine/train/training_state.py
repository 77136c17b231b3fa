"""What a run needs to resume, beside its weights and its position."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..checkpoint import state as train_state
from ..checkpoint.manifest import Manifest
from .parts import Parts, Position


class TrainingState:
    """Optimizer, random numbers, loss scale and streams of a run on this rank.

    Args:
        parts: the parts of the run, restored in place.
        group: a gloo group of all ranks; None: one process.
    """

    def __init__(self, parts: Parts, group: ProcessGroup | None) -> None:
        self.parts = parts
        self.group = group

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps."""
        tensors = train_state.optimizer_state(self.parts.model, self.parts.optimizer)
        return tensors | train_state.random_state(self.parts.world.rank)

    def numbers(self, position: Position) -> dict[str, Any]:
        """Return the numbers that a checkpoint keeps; JSON."""
        return {
            "loss_scale": self.parts.step.scale.state(),
            "optimizer_numbers": self.optimizer_numbers(),
            "streams": self.parts.loader.state(position.batch),
        }

    def optimizer_numbers(self) -> dict[str, float]:
        """Return the optimizer's numbers for the parameters of all pipeline stages."""
        numbers = train_state.optimizer_numbers(self.parts.model, self.parts.optimizer)
        if self.parts.degrees.pipeline == 1:
            return numbers
        # A manifest has the numbers of all parameters, and each stage knows its own.
        by_rank: list[dict[str, float]] = [{} for _ in range(self.parts.degrees.world)]
        dist.all_gather_object(by_rank, numbers, self.group)
        return {name: number for numbers in by_rank for name, number in numbers.items()}

    def prepare(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint fills, in place."""
        parts, rank = self.parts, self.parts.world.rank
        train_state.prepare_optimizer(
            parts.model, parts.optimizer, manifest.tensors, manifest.extra["optimizer_numbers"]
        )
        tensors = train_state.optimizer_state(parts.model, parts.optimizer)
        # A rank that the saving run did not have keeps the seed that it has begun with.
        return tensors | (train_state.random_state(rank) if rank < manifest.world else {})

    def restore(self, manifest: Manifest, filled: dict[str, Tensor]) -> None:
        """Continue from a checkpoint.

        Args:
            manifest: the manifest of the checkpoint.
            filled: what `prepare` returned, filled.
        """
        rank = self.parts.world.rank
        if rank < manifest.world:
            train_state.restore_random_state(rank, filled)
        self.parts.loader.restore(manifest.extra.get("streams", {}))
        self.parts.step.scale.restore(manifest.extra["loss_scale"])
