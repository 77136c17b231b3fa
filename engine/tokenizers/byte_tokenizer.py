"""Defines the byte tokenizer, and what all share: loss masks, byte counts, tokens at the start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .tokenizer import Ids, MaskedDocument, Tokenizer
from .tokenizer_files import byte_characters, byte_level_model, write_files


class ByteTokenizer:
    """A tokenizer whose ids 0 to 255 are UTF-8 bytes; id 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes"
    special_tokens: Mapping[str, str] = {}
    chat_template: str | None = None
    token_bytes = np.array([1] * 256 + [0])

    def encode(self, text: str) -> Ids:
        """Return the UTF-8 bytes of a text as ids, uint8 [T]."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of several texts."""
        return [self.encode(text) for text in texts]

    def encode_masked(self, texts: Sequence[MaskedDocument]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return the bytes of each document, and the mask of bytes in loss ranges."""
        encoded = []
        for document in texts:
            ids, offsets = self.encode_with_offsets(document.text)
            encoded.append((ids, mask_tokens(document, *offsets.T)))
        return encoded

    def encode_with_offsets(self, text: str) -> tuple[Ids, NDArray[np.int64]]:
        """Return the bytes of a text, and the range of characters of each, [T, 2]."""
        ids = self.encode(text)
        characters = np.cumsum((ids & 0xC0) != 0x80) - 1  # 10xxxxxx continues a character
        return ids, np.stack([characters, characters + 1], axis=1)

    def enable_fast_encoding(self) -> str:
        """Return the name of the encoder; there is no faster one to enable."""
        return "str.encode"

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode(errors="replace")

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with `<|endoftext|>` for id 256."""
        parts = (b"<|endoftext|>" if token == 256 else bytes([token]) for token in map(int, ids))
        return b"".join(parts).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write files with which transformers gives the same ids; this class does not read them."""
        vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
        model = byte_level_model({"vocab": vocabulary, "merges": []}, {"<|endoftext|>": 256})
        write_files(folder, json.dumps(model, indent=2).encode(), _BYTES_SETTINGS)


def count_text_bytes(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> int:
    """Return the number of bytes of text that ids encode, special tokens left out.

    A byte that is not UTF-8 is decoded to U+FFFD, which takes three bytes in UTF-8. It counts as
    one byte, unless the text itself holds that character.

    Args:
        tokenizer: the tokenizer of the ids.
        ids: the tokens.
        text: the decoded text of the ids.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return sum(token < 256 for token in ids)
    if "\ufffd" in text and tokenizer.encode(text).tolist() != list(ids):
        text = text.replace("\ufffd", "?")
    return len(text.encode())


def mask_tokens(
    document: MaskedDocument, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the loss mask of a document's tokens, [T].

    Args:
        document: the text and its loss ranges.
        starts: index of the first character of each token, [T].
        stops: index after the last character of each token, [T].
    """
    length = len(document.text)
    inside = np.zeros(length + 1, dtype=np.int64)
    for start, stop in document.loss_ranges:
        inside[start + 1 : stop + 1] = 1
    before = np.cumsum(inside)  # [k]: characters of loss ranges among the first k
    starts = np.minimum(starts, max(length - 1, 0))
    stops = np.minimum(np.maximum(stops, starts + 1), length)
    return np.asarray(before[stops] - before[starts] == stops - starts)


_BYTES_SETTINGS = {
    "eos_token": "<|endoftext|>",
    # The text of the token is bytes like any other: only the id ends a document.
    "split_special_tokens": True,
    "clean_up_tokenization_spaces": False,
}


def begin_text(tokenizer: Tokenizer, ids: Ids) -> Ids:
    """Return the ids of a text after the token that the tokenizer begins each text with.

    They stay as they are where there is no such token, or they begin with it already, as chats do
    whose template writes it.
    """
    bos = begin_id(tokenizer)
    if bos is None or (len(ids) and ids[0] == bos):
        return ids
    return np.concatenate([[bos], ids]).astype(np.asarray(ids).dtype)


def begin_masked(
    tokenizer: Tokenizer, ids: Ids, mask: NDArray[np.bool_]
) -> tuple[Ids, NDArray[np.bool_]]:
    """Return what `begin_text` does, and the loss mask, in which the first token does not count."""
    begun = begin_text(tokenizer, ids)
    return begun, np.append(np.zeros(len(begun) - len(ids), dtype=np.bool_), mask)


def begin_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that the tokenizer's own files put before each text; None: there is none."""
    found: int | None = getattr(tokenizer, "bos_id", None)  # tokenizers of plugins need not have it
    return found


def context_id(tokenizer: Tokenizer) -> int:
    """Return the token that stands before the first scored one of a text."""
    bos = begin_id(tokenizer)
    return tokenizer.eos_id if bos is None else bos
