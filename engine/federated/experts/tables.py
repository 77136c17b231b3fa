"""The table of which clients hold which experts. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ...core.config import Table


class ExpertSubsets(Table):
    """Each client holds, trains and sends some experts of a mixture (arXiv:2606.19025)."""

    assignment: Literal["all", "fixed", "random"] = "all"
    """"all": each client holds all experts; "fixed": client c holds the same in each round;
    "random": drawn for each round"""
    overlap: Annotated[float, Field(ge=1)] = 1.0
    """clients that hold an expert, on average: with 1, each expert is at one client or at two"""

    @property
    def is_enabled(self) -> bool:
        """Whether clients hold less than all experts."""
        return self.assignment != "all"
