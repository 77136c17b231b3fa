"""Reads and writes the files of a tokenizer in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..core.errors import DataError
from ..core.files import atomic_write, open_regular

# The largest known tokenizer.json files have 35 MB, with ids below 300,000.
MAX_FILE_BYTES = 2**27
MAX_SETTINGS_BYTES = 2**23
USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's files.

    Args:
        place: the name of the tokenizer in messages.
        content: the bytes of `tokenizer.json`.
        special_tokens: the texts of special tokens by role, such as "eos_token".
        chat_template: a Jinja template, or None.
        stop_token_ids: ids of tokens at which generation stops, beside the end-of-document token.
    """

    place: str
    content: bytes
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    stop_token_ids: Collection[int] = ()


def read_files(path: Path) -> TokenizerFiles:
    """Read `tokenizer.json` and the files beside it.

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
            decode_text(template, read_limited(template, MAX_SETTINGS_BYTES))
            if template.is_file()
            else _default_template(config.get("chat_template"))
        ),
        stop_token_ids=_read_stop_token_ids(file.parent),
    )


def read_limited(file: Path, limit: int, hint: str = "") -> bytes:
    """Return the bytes of a file.

    Args:
        file: the file.
        limit: the largest number of bytes to read.
        hint: the advice of the error.

    Raises:
        DataError: the file cannot be read, or is larger than `limit`.
    """
    try:
        with open_regular(file) as opened:
            content = opened.read(limit + 1)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}", hint) from error
    if len(content) > limit:
        raise DataError(f"{file}: larger than {limit >> 20} MiB, the most that it may have", hint)
    return content


def decode_text(file: Path, content: bytes) -> str:
    """Decode UTF-8 and remove a byte-order mark.

    Raises:
        DataError: the content is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8: {error.reason}") from error


def _settings(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_limited(file, MAX_SETTINGS_BYTES).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{file}: not a JSON object")
    return value


def _read_stop_token_ids(folder: Path) -> list[int]:
    """Return `eos_token_id` of generation_config.json, or without one of config.json.

    transformers (5.23) takes the stop tokens of `generate` from the same files.
    """
    generation = folder / "generation_config.json"
    try:
        settings = _settings(generation if generation.is_file() else folder / "config.json")
    except DataError:
        return []  # neither file is the tokenizer's: a malformed one must not stop a run
    found = settings.get("eos_token_id")
    return [each for each in (found if isinstance(found, list) else [found]) if type(each) is int]


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _default_template(value: Any) -> str | None:
    """Return the template of `tokenizer_config.json`; of several, the one named "default"."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def find_eos_token(place: str, names: Container[str]) -> str:
    """Return the first of the usual end-of-document tokens that a tokenizer has.

    Args:
        place: the name of the tokenizer in messages.
        names: the texts of tokens.

    Raises:
        DataError: the tokenizer has none of these tokens.
    """
    for name in USUAL_EOS:
        if name in names:
            return name
    raise DataError(f"{place}: nothing says which token ends a document", "set tokenizer.eos_token")


def write_files(folder: Path, content: bytes, settings: Mapping[str, Any]) -> None:
    """Write a tokenizer in Hugging Face's format and sync the files to disk.

    Args:
        folder: an existing folder.
        content: the bytes of `tokenizer.json`.
        settings: the keys of `tokenizer_config.json`.
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
    """Return the printable character that represents each byte in byte-level vocabularies.

    Source: `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: 256 + number for number, byte in enumerate(others)}
    return [chr(stand_ins.get(byte, byte)) for byte in range(256)]


def byte_level_model(
    model: Mapping[str, Any],
    special_tokens: Mapping[str, int],
    pre_tokenizer: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of the `tokenizer.json` of a byte-level BPE.

    Args:
        model: the vocabulary and the merges.
        special_tokens: the ids of special tokens by text.
        pre_tokenizer: the step that splits the text before bytes are mapped; None for no split.
    """
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    steps = {"type": "Sequence", "pretokenizers": [pre_tokenizer, byte_level]}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": name, "special": True, **flags}
            for name, number in sorted(special_tokens.items(), key=itemgetter(1))
        ],
        "pre_tokenizer": steps if pre_tokenizer else byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", **model},
    }
