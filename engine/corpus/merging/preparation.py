"""What a folder of tokens is made from: all of a corpus, or the part of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_hexdigest

from ...core.errors import RecipeError
from ...sources.configs import DocumentSource, SourcePart
from ...tokenizers.tokenizer import Tokenizer
from ..manifest import PartEntry
from ..store import SHARD_TOKENS


@dataclass(frozen=True)
class Preparation:
    """The inputs of one folder of tokens.

    Attributes:
        sources: the sources, whose documents are concatenated.
        tokenizer: the tokenizer.
        tokenizer_name: the tokenizer's name in a recipe; if given, the tokenizer's files are stored
            beside the tokens.
        shard_tokens: the number of tokens in a file.
        workers: the number of processes; 0 is one for each core.
        dedup: which documents are left out; see `parse_dedup`.
        share: which part of the corpus is prepared: its number, from 1, and the number of parts.
    """

    sources: Sequence[DocumentSource]
    tokenizer: Tokenizer
    tokenizer_name: str = ""
    shard_tokens: int = SHARD_TOKENS
    workers: int = 0
    dedup: str = ""
    share: tuple[int, int] = (1, 1)

    def inputs(self) -> str:
        """Return a hash of everything that the tokens depend on."""
        return combine_inputs(self.all_inputs(), dedup=self.dedup, share=self.share)

    def all_inputs(self) -> str:
        """Return the same of the whole corpus with its duplicates."""
        return self._hash([source.fingerprint() for source in self.sources])

    def _hash(self, fingerprints: Sequence[str]) -> str:
        pairs = zip(self.sources, fingerprints, strict=True)
        states = [f"{source.on_error} {fingerprint}" for source, fingerprint in pairs]
        inputs = [self.tokenizer.fingerprint, self.tokenizer_name, self.shard_tokens, states]
        return xxh3_128_hexdigest(repr(inputs).encode())

    def parts(self) -> list[SourcePart]:
        """Return the parts of every source, in order, that this preparation is to tokenise.

        Raises:
            RecipeError: there are fewer parts than shares.
        """
        every = [(source, part) for source in self.sources for part in source.parts()]
        number, of = self.share
        mine = every[len(every) * (number - 1) // of : len(every) * number // of]
        if not mine:
            message = f"part {number}/{of} would be empty: the sources divide into {len(every)}"
            raise RecipeError(message, f"give --part I/{max(len(every), 1)}, or fewer")
        return mine

    def describe_share(self) -> PartEntry | None:
        """Return what the folder says of the part that it holds; None: it is the whole corpus."""
        number, of = self.share
        if of == 1:
            return None
        contents = self._hash([source.content_fingerprint() for source in self.sources])
        return PartEntry(number=number, of=of, inputs=self.all_inputs(), contents=contents)


def combine_inputs(inputs: str, *, dedup: str = "", share: tuple[int, int] = (1, 1)) -> str:
    """Return the hash of a corpus that is prepared without duplicates, or in part.

    Args:
        inputs: the hash of the whole corpus with its duplicates.
        dedup: see `parse_dedup`.
        share: see `Preparation`.
    """
    if not dedup and share == (1, 1):
        return inputs
    return xxh3_128_hexdigest(f"{inputs} {dedup} {share}".encode())
