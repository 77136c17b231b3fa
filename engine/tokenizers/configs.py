"""Tokenizers: their recipe tables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..core.config import Component, CountOrZero, HubPath, RecipePath
from ..core.registry import Registry
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
        from .byte_tokenizer import ByteTokenizer

        return ByteTokenizer()


@tokenizers.register
class HFTokenizer(TokenizerConfig):
    """A Hugging Face `tokenizer.json` (extra `[hf]`)."""

    name: Literal["hf"] = "hf"
    path: HubPath
    """the file, or the folder that holds `tokenizer.json`, relative to the recipe; or the id of a
    model on the Hugging Face hub, such as "Qwen/Qwen3-0.6B" or "Qwen/Qwen3-0.6B@REVISION" """
    eos_token: str | None = None
    """end-of-document token; default: what `tokenizer_config.json` beside it says"""

    def build(self) -> Tokenizer:
        """Return the tokenizer read from the file."""
        from ..download.hub import TOKENIZER_FILES, resolve_folder
        from .hf_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer(resolve_folder(self.path, TOKENIZER_FILES), self.eos_token)


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
