"""Gemma 3's language model (Gemma Team 2025, arXiv:2503.19786, section 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.choose import Kernels
from ..decoder import GroupedQueryDecoder, Tables
from ..grouped_query_config import GroupedQueryConfig
from ..language_model import KVCache
from ..layers.rotary import frequencies, rotation


class Gemma3(GroupedQueryDecoder):
    """A decoder whose blocks with a window have rotary frequencies of their own.

    Args:
        config: sizes, with the vocabulary settled.
        kernels: the implementations.
        local_theta: base of the rotary frequencies of blocks with a window.
    """

    def __init__(self, config: GroupedQueryConfig, kernels: Kernels, local_theta: float) -> None:
        super().__init__(config, kernels)
        self.local_theta = local_theta
        self.register_buffer("local_frequencies", self._local_frequencies(), persistent=False)

    def _local_frequencies(self) -> Tensor:
        # On the CPU: see `Decoder`.
        return frequencies(self.config.rotary_width, self.local_theta, torch.device("cpu"))

    def tables(
        self,
        positions: Tensor,
        document_ids: Tensor | None,
        cache: KVCache | None,
        max_documents: int | None = None,
    ) -> Sequence[Tables]:
        """Return rotation and mask for each block; see `Decoder.tables`."""
        whole = super().tables(positions, document_ids, cache, max_documents)
        near = rotation(positions, self.local_frequencies)
        return [
            table if self.config.window_of(number) is None else (*near, table[2])
            for number, table in enumerate(whole)
        ]

    def init_buffers(self, device: torch.device) -> None:
        """Compute the rotary frequencies of both kinds of blocks."""
        super().init_buffers(device)
        self.local_frequencies = self._local_frequencies().to(device)
