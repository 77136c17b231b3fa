"""The table of what is merged. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...core.config import Table


class Admission(Table):
    """Which updates are merged; one that is not finite never is."""

    max_norm_ratio: Annotated[float, Field(ge=1)] | None = None
    """rejects an update whose L2 norm is more than so many times the median of the round's"""
    min_cosine: Annotated[float, Field(ge=-1, le=1)] | None = None
    """rejects an update whose cosine with the sum of the others' directions is less"""

    @property
    def compares(self) -> bool:
        """Whether the updates of a round are compared with one another."""
        return self.max_norm_ratio is not None or self.min_cosine is not None
