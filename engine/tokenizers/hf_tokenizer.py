"""Tokenizers of the `tokenizers` library."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError, EnvironmentFault, nearest
from ..core.files import open_regular
from .fast_bpe import FastBPE, Unproven
from .token_bytes import vocabulary_bytes
from .tokenizer import Ids, learned_tokens, write_files

if TYPE_CHECKING:
    from .marked_text import MarkedText

# The largest known are 35 MB, with ids below 300,000.
MAX_FILE_BYTES = 2**27
MAX_SETTINGS_BYTES = 2**23
MAX_VOCABULARY = 2**24
FAST_FROM_CHARACTERS = 2**22
USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerFiles:
    """What Hugging Face keeps of a tokenizer.

    Args:
        place: what to call it in messages.
        content: of `tokenizer.json`.
        special_tokens: texts by role, such as "eos_token".
        chat_template: Jinja.
    """

    place: str
    content: bytes
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Args:
        files: their content; or the path of `tokenizer.json`, or of the folder that holds it.
        eos_token: the end-of-document token; None: what the files beside it say.

    Raises:
        DataError: a file is missing or malformed, or there is no such token.
        EnvironmentFault: the `tokenizers` package is not installed.
    """

    def __init__(self, files: Path | TokenizerFiles, eos_token: str | None = None) -> None:
        self.files = read_files(files) if isinstance(files, Path) else files
        place = self.files.place
        self._tokenizer = _load(place, self.files.content)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCABULARY:
            raise DataError(
                f"{place}: an id is {self.vocab_size - 1}; "
                f"{MAX_VOCABULARY - 1} is the largest possible"
            )
        self.eos_token = eos_token or _eos_token(self.files, vocabulary)
        if self.eos_token not in vocabulary:
            hint = nearest(self.eos_token, vocabulary)
            raise DataError(f"{place}: no token is named {self.eos_token!r}", hint)
        self.eos_id = vocabulary[self.eos_token]
        self.special_tokens: Mapping[str, str] = {
            **self.files.special_tokens,
            "eos_token": self.eos_token,
        }
        self.chat_template = self.files.chat_template
        self.encoder = ""
        self._fast: FastBPE | None = None
        self._characters = 0
        self.fingerprint = xxh3_128_hexdigest(self.files.content + b"\n%d" % self.eos_id)

    def encode(self, text: str) -> Ids:
        """Return the text's ids; no special token is added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts, tokenised on all cores."""
        self._characters += sum(map(len, texts))
        if self._characters >= FAST_FROM_CHARACTERS and not self.encoder:
            self.prepare_bulk()
        found: list[Ids | None] = [None] * len(texts)
        if self._fast:
            found = self._fast.encode_batch(texts)
        left = [index for index, ids in enumerate(found) if ids is None]
        encodings = self._tokenizer.encode_batch_fast(
            [texts[index] for index in left], add_special_tokens=False
        )
        for index, encoding in zip(left, encodings, strict=True):
            found[index] = np.array(encoding.ids, dtype=np.uint32)
        return [ids for ids in found if ids is not None]

    def prepare_bulk(self) -> str:
        """Choose the library that encodes much text; done by itself after some millions.

        Returns:
            its name, and why the faster one is not taken if it is not.
        """
        if not self.encoder:
            try:
                self._fast = FastBPE(self._tokenizer)
                self.encoder = "tiktoken, proven to give the same ids"
            except Unproven as reason:
                self.encoder = f"tokenizers ({reason})"
            log.info("%s: encoding with %s", self.files.place, self.encoder)
        return self.encoder

    def encode_marked(self, texts: Sequence[MarkedText]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Return ids by the library's offsets; its normalizer's changes are traced back."""
        encodings = self._tokenizer.encode_batch(
            [marked.text for marked in texts], add_special_tokens=False
        )
        found = []
        for marked, encoding in zip(texts, encodings, strict=True):
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            learned = learned_tokens(marked, offsets[:, 0], offsets[:, 1])
            found.append((np.array(encoding.ids, dtype=np.uint32), learned))
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, special tokens left out."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

    @cached_property
    def token_bytes(self) -> NDArray[np.int64] | None:
        """Bytes of text that each id stands for, where the vocabulary tells."""
        return vocabulary_bytes(self.files.content, self._tokenizer.get_vocab())

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer` and this class load."""
        settings: dict[str, Any] = {**self.special_tokens, "clean_up_tokenization_spaces": False}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        write_files(folder, self.files.content, settings)


def read_files(path: Path) -> TokenizerFiles:
    """Read `tokenizer.json` and what lies beside it.

    Raises:
        DataError: a file is missing, too large or malformed.
    """
    path = path.expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    hint = "tokenizer.path is a tokenizer.json or its folder"
    content = read_limited(file, MAX_FILE_BYTES, hint)
    config = _settings(file.with_name("tokenizer_config.json"))
    special = {**_settings(file.with_name("special_tokens_map.json")), **config}
    template = file.with_name("chat_template.jinja")
    return TokenizerFiles(
        place=str(file),
        content=content,
        special_tokens={
            name: text
            for name, token in special.items()
            if name.endswith("_token") and (text := _token_text(token)) is not None
        },
        chat_template=(
            decoded(template, read_limited(template, MAX_SETTINGS_BYTES))
            if template.is_file()
            else _default_template(config.get("chat_template"))
        ),
    )


def read_limited(file: Path, limit: int, hint: str = "") -> bytes:
    """Return a file's bytes.

    Raises:
        DataError: it cannot be read, or it has more than `limit` bytes.
    """
    try:
        with open_regular(file) as opened:
            content = opened.read(limit + 1)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", hint) from error
    if len(content) > limit:
        raise DataError(f"{file}: larger than {limit >> 20} MiB, the most that it may have", hint)
    return content


def decoded(file: Path, content: bytes) -> str:
    """Return UTF-8 text without a byte-order mark.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason}") from error


def _settings(file: Path) -> dict[str, Any]:
    """Return a JSON object, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_limited(file, MAX_SETTINGS_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: not a JSON object")
    return value


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _default_template(value: Any) -> str | None:
    """Return the template of `tokenizer_config.json`; of several, the one named "default"."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def library() -> Any:
    """Return the `tokenizers` package.

    Raises:
        EnvironmentFault: it is not installed.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise EnvironmentFault(
            "this tokenizer needs the tokenizers package", 'pip install "trainer[hf]"'
        ) from error
    return tokenizers


def _load(place: str, content: bytes) -> Any:
    native = library().Tokenizer
    try:
        tokenizer = native.from_str(content.decode())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception for malformed files, and panics of Rust
        raise DataError(f"{place}: not a tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = None  # without special tokens it only cuts spaces off the offsets
    return tokenizer


def _eos_token(files: TokenizerFiles, vocabulary: Mapping[str, int]) -> str:
    """Return the end-of-document token that the files name, or one of its usual names."""
    if "eos_token" in files.special_tokens:
        return files.special_tokens["eos_token"]
    for name in USUAL_EOS:
        if name in vocabulary:
            return name
    raise DataError(
        f"{files.place}: nothing says which token ends a document", "set tokenizer.eos_token"
    )
