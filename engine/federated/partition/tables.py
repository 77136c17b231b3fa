"""The table of a client that differs from the others. Torch-free."""

from __future__ import annotations

from ...core.config import SplitName, Table


class FederationClient(Table):
    """A client that differs from the others."""

    name: SplitName
    """what metrics and messages call it"""
    sources: list[str] = []
    """labels of the data.sources that it trains on; empty: its part by federation.partition"""
