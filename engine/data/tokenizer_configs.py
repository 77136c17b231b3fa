"""Tokenizers that are trained here or come in tiktoken's format: their recipe tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .configs import HFTokenizer, tokenizers

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@tokenizers.register
class BPETokenizer(HFTokenizer):
    """A byte-level BPE made by `trainer data train-tokenizer` (extra `[hf]`)."""

    name: Literal["bpe"] = "bpe"  # type: ignore[assignment]

    def build(self) -> Tokenizer:
        """Return the tokenizer read from the folder."""
        from .hf_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer(Path(self.path), self.eos_token)
