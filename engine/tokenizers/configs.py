"""Tokenizers: their recipe tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.config import Component, RecipePath
from ..core.registry import Registry

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class TokenizerConfig(Component):
    """Base of every tokenizer's table."""

    def build(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            DataError: its files are missing or not what they should be.
        """
        raise NotImplementedError


tokenizers: Registry[TokenizerConfig] = Registry("tokenizer", default="bytes")


@tokenizers.register
class BytesTokenizer(TokenizerConfig):
    """UTF-8 bytes, one token each, and an end-of-document token; needs no files."""

    name: Literal["bytes"] = "bytes"

    def build(self) -> Tokenizer:
        """Return the byte tokenizer."""
        from .tokenizer import ByteTokenizer

        return ByteTokenizer()


@tokenizers.register
class HFTokenizer(TokenizerConfig):
    """A Hugging Face `tokenizer.json` (extra `[hf]`)."""

    name: Literal["hf"] = "hf"
    path: RecipePath
    """the file, or the folder that holds `tokenizer.json`; relative to the recipe"""
    eos_token: str | None = None
    """end-of-document token; default: what `tokenizer_config.json` beside it says"""

    def build(self) -> Tokenizer:
        """Return the tokenizer read from the file."""
        from .hf_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer(Path(self.path), self.eos_token)
