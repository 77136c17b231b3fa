"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.files import atomic_write

if TYPE_CHECKING:
    from .marked_text import MarkedText

Ids = NDArray[Any]
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


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes"
    special_tokens: Mapping[str, str] = {}
    chat_template: str | None = None
    token_bytes = np.array([1] * 256 + [0])

    def encode(self, text: str) -> Ids:
        """Return the text's bytes."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of several texts."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, texts: Sequence[MarkedText]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return the bytes of several documents; those of a learned character are learned."""
        found = []
        for marked in texts:
            ids = self.encode(marked.text)
            characters = np.cumsum((ids & 0xC0) != 0x80) - 1  # 10xxxxxx continues a character
            found.append((ids, learned_tokens(marked, characters, characters + 1)))
        return found

    def prepare_bulk(self) -> str:
        """Return how bytes are had: there is nothing to prepare."""
        return "str.encode"

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write what gives the same ids in transformers; it needs no files itself."""
        write_files(folder, json.dumps(_byte_level_model(), indent=2).encode(), _BYTES_SETTINGS)


def count_bytes(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """Return how many bytes of text some ids stand for, special tokens left out.

    In their text, bytes that are not UTF-8 are U+FFFD, which has three bytes of its own: unless
    the text does hold that character, it counts as one.

    Args:
        ids: tokens.
        text: what they are decoded to.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return sum(token < 256 for token in ids)
    if "\ufffd" in text and tokenizer.encode(text).tolist() != list(ids):
        text = text.replace("\ufffd", "?")
    return len(text.encode())


def learned_tokens(
    marked: MarkedText, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which tokens are learned, [T].

    Args:
        marked: the document.
        starts: [T], the first character of each token.
        stops: [T], the character after its last.
    """
    length = len(marked.text)
    inside = np.zeros(length + 1, dtype=np.int64)
    for start, stop in marked.learned:
        inside[start + 1 : stop + 1] = 1
    before = np.cumsum(inside)  # [k]: learned characters among the first k
    starts = np.minimum(starts, max(length - 1, 0))
    stops = np.minimum(np.maximum(stops, starts + 1), length)
    return np.asarray(before[stops] - before[starts] == stops - starts)


def write_files(folder: Path, content: bytes, settings: Mapping[str, Any]) -> None:
    """Write a tokenizer as Hugging Face's libraries read it, and sync it to disk.

    Args:
        folder: exists.
        content: of `tokenizer.json`.
        settings: of `tokenizer_config.json`.
    """
    texts = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **settings},
        "special_tokens_map.json": {
            name: token for name, token in settings.items() if name.endswith("_token")
        },
    }
    atomic_write(folder / "tokenizer.json", content.decode())
    for name, value in texts.items():
        atomic_write(folder / name, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def byte_characters() -> list[str]:
    """Return the printable stand-in of each byte in byte-level vocabularies.

    Source: `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: 256 + number for number, byte in enumerate(others)}
    return [chr(stand_ins.get(byte, byte)) for byte in range(256)]


_BYTES_SETTINGS = {
    "eos_token": "<|endoftext|>",
    # The text of the token is bytes like any other: only the id ends a document.
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}


def _byte_level_model() -> dict[str, Any]:
    """Return a `tokenizer.json` of 256 bytes, no merges, and the end-of-document token."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    end = {"id": 256, "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }
