"""Sources of a plugin's own samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .configs import SourceConfig


class MapDataset(Protocol):
    """Samples by number, such as a map-style `torch.utils.data.Dataset`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a sample: an array, a tensor or a number for each field, always the same."""


class DatasetSource(SourceConfig):
    """Base of sources of a plugin's own samples, such as images, for the "supervised" task."""

    def build(self, split: str) -> MapDataset:
        """Return the samples of a split, "train" or "validation"; see `MapDataset`.

        Raises:
            DataError: the samples cannot be read; the message names the file.
        """
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a text that changes whenever the samples may have changed.

        The number of samples need not be in it.
        """
        return self.model_dump_json(exclude={"label", "weight"})
