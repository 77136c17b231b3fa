"""The recipe's `[federation.elastic]` table. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...core.config import Count, Table

Seconds = Annotated[float, Field(gt=0, le=1e6)]


class Elastic(Table):
    """When the replica groups of carrier = "elastic" wait for one another."""

    min_replicas: Count = 1
    """replica groups that an outer step needs; with fewer, those that are there wait"""
    timeout_seconds: Seconds = 60.0
    """how long a replica group waits in an exchange for one that does not answer, before it forms
    another quorum"""
    join_seconds: Annotated[float, Field(ge=0, le=1e6)] = 60.0
    """how long a replica group that starts waits for those that are missing, if none trains yet"""
