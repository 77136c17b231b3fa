"""The recipe's `[lora]` table. Torch-free."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from ..core.config import CountOrZero, HubPath, Table


class LoRA(Table):
    """Low-rank adapters: the weights are frozen, and small matrices beside them are trained."""

    rank: CountOrZero = 0
    """width of the adapters; 0: none, all weights are trained"""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """the adapters' output is scaled by alpha / rank"""
    rslora: bool = False
    """scale by alpha / sqrt(rank) instead, which suits large ranks (Kalajdzievski 2023, arXiv
    2312.03732)"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of each adapter's input that is dropped in training"""
    dora: bool = False
    """also train the norm of each weight's rows, and let adapters change directions alone (Liu et
    al. 2024, arXiv 2402.09353)"""
    targets: Annotated[list[str], Field(min_length=1, max_length=100)] = [
        "*.attention.*.weight",
        "*.mlp.*.weight",
    ]
    """which weights get one: globs over parameter names, or "re:..." for a regular expression"""
    init_from: HubPath = ""
    """folder or hub id of a PEFT adapter to start from; default: adapters start at zero; resume
    wins"""

    def scale(self, rank: int | None = None) -> float:
        """Return what the output of an adapter is multiplied by.

        Args:
            rank: width of the adapter; None: the table's.
        """
        rank = rank or self.rank
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)
