"""Sources of tokens: their recipe tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.config import Count, CountOrZero, RecipePath
from ..sources.configs import SourceConfig, sources
from ..tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .store import TokenStore


class TokenSource(SourceConfig):
    """Base of sources whose documents are tokens already."""

    def open(self, tokenizer: Tokenizer, cache: Path) -> TokenStore:
        """Return the source's documents as tokens, memory-mapped.

        Raises:
            DataError: with the file.
        """
        raise NotImplementedError


@sources.register
class TokensSource(TokenSource):
    """Token shards made by `trainer data prepare`, memory-mapped."""

    name: Literal["tokens"] = "tokens"
    path: RecipePath
    """the folder with `tokens.json`, or a glob of such folders, which are then one source, in the
    order of their names; relative to the recipe"""
    verify: Literal["first", "never"] = "first"
    """"first": a run that reads files which no run has read before, or which were touched since,
    compares them with their checksums; "never": `trainer data inspect` alone does"""

    def open(self, tokenizer: Tokenizer, cache: Path) -> TokenStore:
        """Return the folder's tokens.

        Raises:
            DataError: it is incomplete, or another tokenizer made it.
        """
        from .store import TokenStore

        return TokenStore.open(Path(self.path), tokenizer)


@sources.register
class SyntheticSource(TokenSource):
    """Random tokens with a learnable pattern: for benchmarks and tests."""

    name: Literal["synthetic"] = "synthetic"
    num_documents: Count = 4096
    """documents before the source repeats"""
    document_tokens: Count = 512
    """mean tokens a document; lengths vary by half of it"""
    seed: CountOrZero = 0
    """other seeds give other documents"""

    def open(self, tokenizer: Tokenizer, cache: Path) -> TokenStore:
        """Return the generated tokens."""
        from .synthetic import make_synthetic_store

        return make_synthetic_store(self.num_documents, self.document_tokens, self.seed, tokenizer)
