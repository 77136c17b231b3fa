"""A model that is too large for one rank, as one that generates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...model_zoo.language_model import KVCache, LanguageModel
from ..parallel.pipeline.pipeline import Pipeline


class PipelinedModel(LanguageModel):
    """Gives each rank of a pipeline the logits of the last position.

    All ranks call it with the same tokens. Each stage keeps keys and values of its blocks.

    Args:
        model: this rank's part.
        pipeline: that runs it.
        vocab: how many logits there are.
    """

    def __init__(self, model: LanguageModel, pipeline: Pipeline, vocab: int) -> None:
        super().__init__()
        self.part = model
        self.pipeline = pipeline
        self.vocab = vocab
        self.takes_padding = model.takes_padding
        self._caches: tuple[KVCache | None, dict[int, KVCache]] = None, {}

    def forward(
        self, tokens: Tensor | None, *, cache: KVCache | None = None, **columns: Any
    ) -> Tensor:
        """Return [B, 1, V]; see `LanguageModel`."""
        assert tokens is not None, "the first stage embeds"
        assert cache is not None, "positions are generated one after the other"
        if self._caches[0] is not cache:
            own = {number: KVCache(cache.capacity) for number in self.pipeline.stages}
            self._caches = cache, own
        own = self._caches[1]
        return self.pipeline.next_logits(
            tokens, lambda number: {**columns, "cache": own[number]}, self.vocab
        )
