"""The interface of tokenizers. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class MaskedDocument:
    """A document of which only some parts are trained on, such as the assistant's turns.

    Args:
        text: the whole document.
        loss_ranges: the `[start, stop)` ranges of characters that count in the loss, ascending.
    """

    text: str
    loss_ranges: tuple[tuple[int, int], ...]


Ids: TypeAlias = "NDArray[Any]"
PARALLELISM = "TOKENIZERS_PARALLELISM"
"""the environment variable that limits the tokenizers library to one thread"""


@runtime_checkable
class OffsetTokenizer(Protocol):
    """A tokenizer that tells which characters a token stands for. Those of plugins need not."""

    def encode_with_offsets(self, text: str) -> tuple[Ids, NDArray[np.int64]]:
        """Return the ids of a text, and `[start, stop)` of the characters of each, [T, 2].

        The ids are those of `encode`. A token may hold the space before a word. Tokens that share
        a character, such as the bytes of one, all have its range.
        """


@runtime_checkable
class SpecialTokenDecoder(Protocol):
    """A tokenizer that can show special tokens. Those of plugins need not."""

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Return the text of the ids with the texts of special tokens."""


@runtime_checkable
class TokenizerWithStopTokens(Protocol):
    """A tokenizer with more stop tokens than `eos_id`. Tokenizers of plugins need not have any."""

    stop_token_ids: Collection[int]
    """ids of the tokens at which generation stops: `eos_id`, and such as end a turn"""


class Tokenizer(Protocol):
    """The interface that data, evaluation and generation use."""

    vocab_size: int
    """one more than the largest id"""
    eos_id: int
    """the end-of-document token"""
    fingerprint: str
    """a hash that changes whenever the same text may give other ids"""
    special_tokens: Mapping[str, str]
    """texts of tokens with a role, such as "bos_token" and "eos_token": chat templates use them"""
    chat_template: str | None
    """the Jinja template that came with it"""

    def encode(self, text: str) -> Ids:
        """Return the text's ids, 1-D, without the end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts."""

    def encode_masked(self, texts: Sequence[MaskedDocument]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return the ids of several documents, and the loss mask of each.

        The ids are those of `encode_batch`. A token counts in the loss if all characters that it
        stands for, even in part, lie in loss ranges: one that crosses the border of a range does
        not. A token that stands for no character, such as a space put before the text, goes with
        the character after it.
        """

    def enable_fast_encoding(self) -> str:
        """Use the fastest encoder that gives the same ids, and return a description of it.

        Call it before processes are forked that encode: each of them is then spared the check.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""

    def save(self, folder: Path) -> None:
        """Write the files that rebuild it into the folder."""
