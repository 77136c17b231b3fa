"""How many bytes of text each token of a `tokenizer.json` stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPACE = "\u2581"
"""stands for a space in vocabularies of SentencePiece"""


def vocabulary_bytes(content: bytes, vocabulary: Mapping[str, int]) -> NDArray[np.int64] | None:
    """Return the UTF-8 bytes that each id of a `tokenizer.json` stands for; special tokens have 0.

    Known are byte-level vocabularies, in which a character is a byte, and SentencePiece's, in which
    a token is text (or one byte, `<0x0A>`). A space that the tokenizer puts before a document
    counts as a byte of it.

    Args:
        content: of `tokenizer.json`.
        vocabulary: id by token, added tokens included.

    Returns:
        [largest id + 1], or None where tokens say too little, such as WordPiece's of spaces.
    """
    description = json.loads(content)
    decoder = description.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    size: Callable[[str], int]
    if any(part.get("type") == "ByteLevel" for part in parts):
        size = len
    elif not any(map(_makes_spaces, parts)):
        return None
    elif description["model"].get("byte_fallback"):
        size = _size_of_byte_or_text
    else:
        size = _size_of_text
    table = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
    for token, number in vocabulary.items():
        table[number] = size(token)
    for added in description.get("added_tokens") or ():
        table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return table


def _makes_spaces(decoder: Mapping[str, Any]) -> bool:
    pattern = decoder.get("pattern", {}).get("String")
    return SPACE in (pattern, decoder.get("replacement"))


def _size_of_text(token: str) -> int:
    return len(token.replace(SPACE, " ").encode())


def _size_of_byte_or_text(token: str) -> int:
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else _size_of_text(token)
