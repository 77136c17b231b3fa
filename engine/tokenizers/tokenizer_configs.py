"""Tokenizers that are trained here or come in tiktoken's format: their recipe tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.config import CountOrZero, RecipePath
from .configs import HFTokenizer, TokenizerConfig, tokenizers

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@tokenizers.register
class BPETokenizer(HFTokenizer):
    """A byte-level BPE made by `trainer data train-tokenizer` (extra `[hf]`)."""

    name: Literal["bpe"] = "bpe"  # type: ignore[assignment]


@tokenizers.register
class TiktokenTokenizer(TokenizerConfig):
    """A vocabulary in tiktoken's format, base64 and rank a line (extra `[data]`)."""

    name: Literal["tiktoken"] = "tiktoken"
    path: RecipePath
    """the file, such as `cl100k_base.tiktoken` or Llama 3's `tokenizer.model`"""
    pattern: str = "cl100k"
    """how text is cut before pairs are merged: "gpt2", "cl100k", "llama3", "qwen2", "o200k", or a
    regular expression"""
    special_tokens: list[str] | dict[str, CountOrZero] = []
    """those beside the file: names, numbered on from the largest rank, or a table of their ids;
    default: those of the model that the pattern is named for"""
    eos_token: str | None = None
    """end-of-document token; default: the special token with one of the usual names"""

    def build(self) -> Tokenizer:
        """Return the tokenizer read from the file."""
        from .hf_tokenizer import HuggingFaceTokenizer
        from .tiktoken_file import read_tiktoken

        files, eos_token = read_tiktoken(
            Path(self.path), self.pattern, self.special_tokens, self.eos_token
        )
        return HuggingFaceTokenizer(files, eos_token)
