"""The interface of tokenizers. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class MarkedText:
    """A document of which only some parts are learned from, such as the assistant's turns.

    Args:
        text: the whole document.
        learned: `[start, stop)` ranges of its characters, ascending, that count in the loss.
    """

    text: str
    learned: tuple[tuple[int, int], ...]


Ids: TypeAlias = "NDArray[Any]"
PARALLELISM = "TOKENIZERS_PARALLELISM"
"""the environment variable by which the tokenizers library is kept to one thread"""


class Tokenizer(Protocol):
    """What the data and generation need of a tokenizer."""

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

    def encode_marked(self, texts: Sequence[MarkedText]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return the ids of several documents, and which of them are learned.

        The ids are those of `encode_batch`. A token is learned if all characters that it stands
        for, even in part, lie in learned ranges: one that reaches over a range's border is not. A
        token that stands for none, such as a space put before the text, goes with the character
        after it.
        """

    def prepare_bulk(self) -> str:
        """Get ready for much text, and return what will encode it; the ids stay the same.

        Called before processes are forked that encode, it spares each of them the work.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""

    def save(self, folder: Path) -> None:
        """Write the files that rebuild it into the folder."""
