"""Wraps tokenizers of the `tokenizers` library."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, nearest
from ..core.registry import require_package
from .byte_tokenizer import mask_tokens
from .fast_bpe import FastBPE, NotEquivalent
from .tokenizer import Ids, MaskedDocument
from .tokenizer_files import TokenizerFiles, find_eos_token, read_files, write_files

MAX_VOCABULARY = 2**24
FAST_FROM_CHARACTERS = 2**22
SPACE = "\u2581"
"""the character that stands for a space in SentencePiece vocabularies"""

log = logging.getLogger(__name__)


class HuggingFaceTokenizer:
    """A tokenizer that is defined by a `tokenizer.json`.

    Args:
        files: the content of the files, or the path of `tokenizer.json` or of its folder.
        eos_token: the end-of-document token; None takes the one in the files beside
            `tokenizer.json`.

    Raises:
        DataError: a file is missing or malformed, or the vocabulary lacks the token.
        EnvironmentFault: the `tokenizers` package is not installed.
    """

    def __init__(self, files: Path | TokenizerFiles, eos_token: str | None = None) -> None:
        self.files = read_files(files) if isinstance(files, Path) else files
        place = self.files.place
        self._tokenizer, self.bos_id = _load(place, self.files.content)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCABULARY:
            raise DataError(
                f"{place}: an id is {self.vocab_size - 1}; "
                f"{MAX_VOCABULARY - 1} is the largest possible"
            )
        named = eos_token or self.files.special_tokens.get("eos_token")
        self.eos_token = named or find_eos_token(place, vocabulary)
        if self.eos_token not in vocabulary:
            hint = nearest(self.eos_token, vocabulary)
            raise DataError(f"{place}: no token is named {self.eos_token!r}", hint)
        self.eos_id = vocabulary[self.eos_token]
        self.stop_token_ids = {self.eos_id, *self.files.stop_token_ids}
        self.special_tokens: Mapping[str, str] = {
            **self.files.special_tokens,
            "eos_token": self.eos_token,
        }
        self.chat_template = self.files.chat_template
        self.encoder = ""
        self._fast: FastBPE | None = None
        self._characters = 0
        ends = b"\n%d" % self.eos_id + (b" %d" % self.bos_id if self.bos_id is not None else b"")
        self.fingerprint = xxh3_128_hexdigest(self.files.content + ends)

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, uint32 [T], without added special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts, encoded on all cores."""
        self._characters += sum(map(len, texts))
        # The check for tiktoken takes a while, so it only pays for much text.
        if self._characters >= FAST_FROM_CHARACTERS:
            self.enable_fast_encoding()
        fast = self._fast.encode_batch(texts) if self._fast else [None] * len(texts)
        left = [text for text, ids in zip(texts, fast, strict=True) if ids is None]
        encodings = iter(self._tokenizer.encode_batch_fast(left, add_special_tokens=False))
        return [
            np.array(next(encodings).ids, dtype=np.uint32) if ids is None else ids for ids in fast
        ]

    def enable_fast_encoding(self) -> str:
        """Encode with tiktoken from now on if it is verified to give the same ids.

        `encode_batch` calls this after `FAST_FROM_CHARACTERS` characters.

        Returns:
            The name of the encoder, with the reason if tiktoken is not used.
        """
        if not self.encoder:
            try:
                self._fast = FastBPE(self._tokenizer)
                self.encoder = "tiktoken, verified to give the same ids"
            except NotEquivalent as reason:
                self.encoder = f"tokenizers ({reason})"
            log.info("%s: encoding with %s", self.files.place, self.encoder)
        return self.encoder

    def encode_masked(self, texts: Sequence[MaskedDocument]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return the ids and loss mask of each document.

        The library's offsets refer to the text before normalization, as loss ranges do.
        """
        encodings = self._tokenizer.encode_batch(
            [document.text for document in texts], add_special_tokens=False
        )
        encoded = []
        for document, encoding in zip(texts, encodings, strict=True):
            starts, stops = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            mask = mask_tokens(document, starts, stops)
            encoded.append((np.array(encoding.ids, dtype=np.uint32), mask))
        return encoded

    def encode_with_offsets(self, text: str) -> tuple[Ids, NDArray[np.int64]]:
        """Return the ids of a text, and the range of characters that each stands for, [T, 2]."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.array(encoding.ids, dtype=np.uint32), offsets

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Return the text of ids with special tokens."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    @cached_property
    def token_bytes(self) -> NDArray[np.int64] | None:
        """The bytes of text of each id, [ids]; None if the vocabulary does not tell."""
        return vocabulary_bytes(self.files.content, self._tokenizer.get_vocab())

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer` and this class load."""
        settings: dict[str, Any] = {**self.special_tokens, "clean_up_tokenization_spaces": False}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        write_files(folder, self.files.content, settings)


def import_tokenizers() -> Any:
    """Return the `tokenizers` package.

    Raises:
        EnvironmentFault: it is not installed.
    """
    return require_package("tokenizers", "this tokenizer", "hf")


def _load(place: str, content: bytes) -> tuple[Any, int | None]:
    """Return the tokenizer, and the token that its own post-processor puts before each text."""
    native = import_tokenizers().Tokenizer
    try:
        tokenizer = native.from_str(content.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception for malformed files, and panics of Rust
        raise DataError(f"{place}: not a tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    with_added, plain = (tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False))
    begins = bool(plain) and with_added[1 : len(plain) + 1] == plain
    # Whoever encodes adds special tokens; a post-processor otherwise trims spaces off the offsets.
    tokenizer.post_processor = None
    return tokenizer, with_added[0] if begins else None


def vocabulary_bytes(content: bytes, vocabulary: Mapping[str, int]) -> NDArray[np.int64] | None:
    """Return the number of UTF-8 bytes of text of each id of a `tokenizer.json`.

    Two kinds of vocabularies are supported: byte-level ones, in which a character is a byte,
    and SentencePiece's, in which a token is text or one byte such as `<0x0A>`. A space that the
    tokenizer adds before a document counts as a byte. Special tokens count 0.

    Args:
        content: the bytes of `tokenizer.json`.
        vocabulary: the id of each token, added tokens included.

    Returns:
        int64 [largest id + 1], or None if tokens do not determine the text, as in WordPiece, where
        they do not tell the spaces.
    """
    description = json.loads(content)
    decoder = description.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    byte_level = any(part.get("type") == "ByteLevel" for part in parts)
    if not byte_level and not any(map(_makes_spaces, parts)):
        return None
    byte_fallback = bool(description["model"].get("byte_fallback"))

    def size(token: str) -> int:
        if byte_level:
            return len(token)
        is_byte = byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token)
        return 1 if is_byte else len(token.replace(SPACE, " ").encode())

    table = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
    for token, number in vocabulary.items():
        table[number] = size(token)
    for added in description.get("added_tokens") or ():
        table[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return table


def _makes_spaces(decoder: Mapping[str, Any]) -> bool:
    return SPACE in (decoder.get("pattern", {}).get("String"), decoder.get("replacement"))
