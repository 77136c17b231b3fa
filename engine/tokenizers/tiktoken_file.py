"""Converts vocabularies in tiktoken's format to a `tokenizer.json` that gives the same ids.

Each line holds the bytes of a token in base64 and the token's rank, which is also the id. tiktoken
merges the pair whose union has the lowest rank, and leaves a piece that is a token whole. The model
written here does the same: it has a merge for every split of a token into two tokens, in the order
of ranks, and sets `ignore_merges`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import DataError, RecipeError
from .hf_tokenizer import MAX_VOCABULARY, import_tokenizers
from .patterns import PATTERNS, SPECIAL_TOKENS, find_pattern
from .tokenizer_files import (
    TokenizerFiles,
    byte_characters,
    byte_level_model,
    find_eos_token,
    read_limited,
)

MAX_FILE_BYTES = 2**26
MAX_TOKENS = 2**20
MAX_TOKEN_BYTES = 2**10
# Bytes of the tokens of all rules. Published vocabularies need less than a tenth.
MAX_RULES_BYTES = 2**26

SpecialTokens = Sequence[str] | Mapping[str, int]


def read_tiktoken(
    path: Path, pattern: str, special_tokens: SpecialTokens, eos_token: str | None
) -> tuple[TokenizerFiles, str]:
    """Return the files that rebuild the tokenizer, and its end-of-document token.

    Args:
        path: the file of ranks.
        pattern: the name of one of `PATTERNS`, or a regular expression.
        special_tokens: the special tokens with their ids, or a list that is numbered from the
            largest rank on; empty: those of the model that the pattern is named for.
        eos_token: the special token that ends a document; None: the first with a usual name.

    Raises:
        DataError: the file is missing or malformed.
        RecipeError: the pattern or the special tokens do not fit the file.
    """
    ranks = read_ranks(path.expanduser())
    special = _special_tokens(path, ranks, pattern, special_tokens)
    eos_token = eos_token or find_eos_token(str(path), special)
    is_name = pattern in PATTERNS or pattern.isalnum()
    expression = find_pattern(pattern) if is_name else _check_expression(pattern)
    content = json.dumps(build_model_file(path, ranks, expression, special), ensure_ascii=False)
    return TokenizerFiles(str(path), content.encode()), eos_token


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a file of ranks and return the rank of each token.

    Raises:
        DataError: a line is malformed, or a byte has no token, so that some text has no ids.
    """
    content = read_limited(path, MAX_FILE_BYTES, "tokenizer.path is a file in tiktoken's format")
    ranks: dict[bytes, int] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = _parse(line)
            if token in ranks:
                raise ValueError(f"{token!r} is there twice")
            if rank in seen:
                raise ValueError(f"rank {rank} is there twice: the first time in line {seen[rank]}")
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}"[:300]) from error
        ranks[token], seen[rank] = rank, number
        if len(ranks) > MAX_TOKENS:
            raise DataError(f"{path}:{number}: more than {MAX_TOKENS} tokens")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{path}: no token for {len(missing)} of the 256 bytes, such as 0x{missing[0]:02x}",
            "it is not a vocabulary of bytes in tiktoken's format",
        )
    return ranks


def _parse(line: bytes) -> tuple[bytes, int]:
    words = line.split()
    if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 9:
        raise ValueError("expected base64, a space and a rank")
    if len(words[0]) > 2 * MAX_TOKEN_BYTES:
        raise ValueError(f"a token of more than {MAX_TOKEN_BYTES} bytes")
    try:
        token = base64.b64decode(words[0], validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error
    rank = int(words[1])
    if not token or len(token) > MAX_TOKEN_BYTES:
        raise ValueError(f"a token of {len(token)} bytes; 1 to {MAX_TOKEN_BYTES} are possible")
    if rank >= MAX_VOCABULARY:
        raise ValueError(f"rank {rank}; {MAX_VOCABULARY - 1} is the largest possible")
    return token, rank


def _special_tokens(
    path: Path, ranks: Mapping[bytes, int], pattern: str, given: SpecialTokens
) -> dict[str, int]:
    after = max(ranks.values()) + 1
    if not given:
        size, given = SPECIAL_TOKENS.get(pattern, (after, ()))
        if not given or size != after:
            known = f'; those of "{pattern}" follow {size} others' if given else ""
            raise RecipeError(
                f"{path}: {after} tokens, and special ones are not in such a file{known}",
                'name them: tokenizer.special_tokens = ["<|endoftext|>"], or a table of ids',
            )
    if not isinstance(given, Mapping):
        given = {name: after + index for index, name in enumerate(given)}
    for name in given:
        if name.encode(errors="replace") in ranks:
            raise RecipeError(f"tokenizer.special_tokens: {name!r} is in {path} already")
    taken = {*ranks.values()} & {*given.values()}
    if taken or len({*given.values()}) < len(given) or "" in given:
        raise RecipeError(
            f"tokenizer.special_tokens: two tokens have id {min(taken)}"
            if taken
            else "tokenizer.special_tokens: an id is given twice, or a name is empty",
            f"ids from {after} on are free",
        )
    return dict(given)


def _check_expression(pattern: str) -> str:
    try:
        import_tokenizers().Regex(pattern)
    except Exception as error:  # the library raises bare Exception
        raise RecipeError(f"tokenizer.pattern: not a regular expression: {error}") from error
    return pattern


def build_model_file(
    path: Path, ranks: Mapping[bytes, int], pattern: str, special_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return the content of the `tokenizer.json` that gives the same ids.

    Args:
        path: the file of ranks, for messages.
        ranks: the rank of each token.
        pattern: the regular expression that splits text before merging.
        special_tokens: the ids of special tokens by text.

    Raises:
        DataError: the file would be too large.
    """
    characters = byte_characters()
    names = {token: "".join(characters[byte] for byte in token) for token in ranks}
    ordered = sorted(ranks, key=ranks.__getitem__)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    model = {
        "ignore_merges": True,
        # The library gives new ids to added tokens that the vocabulary lacks.
        "vocab": {names[token]: ranks[token] for token in ordered} | dict(special_tokens),
        "merges": [
            [names[left], names[right]] for left, right in _list_merges(path, ordered, ranks)
        ],
    }
    return byte_level_model(model, special_tokens, {**split, "invert": False})


def _list_merges(
    path: Path, tokens: Sequence[bytes], ranks: Mapping[bytes, int]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield every pair of tokens whose union is a token, in the order of the unions."""
    size = 0
    for token in tokens:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                size += len(token)
                if size > MAX_RULES_BYTES:
                    raise DataError(f"{path}: too many of its tokens are made of others")
                yield left, right
