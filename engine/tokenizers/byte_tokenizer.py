"""UTF-8 bytes as tokens, and what all tokenizers share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tokenizer import Ids, MarkedText, Tokenizer
from .tokenizer_files import byte_characters, write_files


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
