"""Where outputs of a frozen model are that were computed before training. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PrecomputedOutputs:
    """Outputs of a frozen model on disk.

    Attributes:
        folder: where they are.
        settings: what they depend on beside the model and the data, by key of the recipe.
    """

    folder: str
    settings: Mapping[str, Any]
