"""Where documents come from."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from glob import glob, has_magic
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_128_hexdigest

from ..errors import DataError
from .configs import DocumentFault
from .order import GOLDEN, mix
from .store import TokenStore

if TYPE_CHECKING:
    from .configs import SyntheticSource
    from .tokenizer import Tokenizer

# Larger text files become several documents; a longer line of JSON is a fault.
MAX_DOCUMENT_BYTES = 2**26
MAX_SYNTHETIC_TOKENS = 2**32

# Installed packages, tests full of deliberately odd text, and a module that differs by machine.
PYTHON_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PYTHON_LEFT_OUT_PREFIX = "_sysconfigdata"


def python_files() -> list[tuple[str, os.stat_result]]:
    """Return path and status of each module of the standard library, in a scattered fixed order.

    The order follows a hash of the path within the library, so that any stretch of it, such as the
    held-out tail, is a random sample of the modules.

    Raises:
        DataError: the library is not in a folder.
    """
    root = sysconfig.get_path("stdlib")
    if not os.path.isdir(root):
        raise DataError(
            f"{root}: this interpreter's standard library is not there as files",
            'use another source, such as "text"',
        )
    found: list[tuple[bytes, str, os.stat_result]] = []
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name in PYTHON_LEFT_OUT or entry.name.startswith(PYTHON_LEFT_OUT_PREFIX):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    inside = Path(entry.path).relative_to(root).as_posix()
                    found.append((blake2b(inside.encode()).digest(), entry.path, entry.stat()))
    return [(path, status) for _, path, status in sorted(found, key=lambda file: file[0])]


def python_documents(max_bytes: int) -> Iterator[str | DocumentFault]:
    """Yield the standard library's modules, at most `max_bytes` of them (0: all)."""
    total = 0
    for path, status in python_files():
        total += status.st_size
        if max_bytes and total > max_bytes:
            return
        try:
            yield Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # the user chose no file here and could repair none


def python_fingerprint(max_bytes: int) -> str:
    """Return the interpreter's version and the modules' sizes and times."""
    states = [(path, status.st_size, status.st_mtime_ns) for path, status in python_files()]
    hashed = xxh3_128_hexdigest(repr(states).encode())
    return f"python {platform.python_version()} {max_bytes} {hashed}"


def matching_files(pattern: str, suffix: str) -> list[Path]:
    """Return the files that a path, a folder or a glob means, sorted by name.

    Args:
        pattern: the path; of a folder all files below it that are not hidden.
        suffix: what a folder's files must end with.

    Raises:
        DataError: there is none.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = [
            file
            for file in path.rglob(f"*{suffix}")
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
    elif path.exists() or not has_magic(pattern):
        files = [path]
    else:
        files = [Path(found) for found in glob(str(path), recursive=True)]
    files = sorted(file for file in files if file.is_file())
    if not files:
        what = "no such file" if not path.exists() else f"no {suffix or 'files'} in this folder"
        raise DataError(f"{pattern}: {what}", "data.sources.path is a file, a folder or a glob")
    return files


def files_fingerprint(pattern: str, suffix: str) -> str:
    """Return a hash of the files' names, sizes and times."""
    states = []
    for file in matching_files(pattern, suffix):
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
        states.append((str(file), status.st_size, status.st_mtime_ns))
    return xxh3_128_hexdigest(repr(states).encode())


def text_documents(pattern: str, suffix: str) -> Iterator[str | DocumentFault]:
    """Yield the text files, those over 64 MiB in parts that end at a line's end."""
    for path in matching_files(pattern, suffix):
        try:
            with open(path, "rb") as file:
                line = 1
                while block := file.read(MAX_DOCUMENT_BYTES):
                    block += file.readline()
                    yield decode(block, str(path), line)
                    line += block.count(b"\n")
        except OSError as error:
            yield DocumentFault(str(path), str(error.strerror))


def decode(block: bytes, place: str, line: int) -> str | DocumentFault:
    """Return UTF-8 text without a byte-order mark, or where it stops being UTF-8."""
    try:
        return block.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += block.count(b"\n", 0, error.start)
        found = f"byte 0x{block[error.start]:02x} is not UTF-8 ({error.reason})"
        return DocumentFault(f"{place}:{line}", found)


def jsonl_documents(pattern: str, suffix: str, field: str) -> Iterator[str | DocumentFault]:
    """Yield one field of each line; blank lines are passed over."""
    for path in matching_files(pattern, suffix):
        number = 0
        try:
            with open(path, "rb") as file:
                while line := file.readline(MAX_DOCUMENT_BYTES):
                    number += 1
                    if len(line) == MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
                        while line and not line.endswith(b"\n"):
                            line = file.readline(MAX_DOCUMENT_BYTES)
                        limit = MAX_DOCUMENT_BYTES >> 20
                        yield DocumentFault(f"{path}:{number}", f"line longer than {limit} MiB")
                    elif not line.isspace():
                        yield _json_text(line, field, str(path), number)
        except OSError as error:
            yield DocumentFault(f"{path}:{number + 1}", str(error.strerror))


def _json_text(line: bytes, field: str, path: str, number: int) -> str | DocumentFault:
    place = f"{path}:{number}"
    text = decode(line, path, number)
    if isinstance(text, DocumentFault):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return DocumentFault(place, f"not JSON: {error}")
    if not isinstance(value, dict):
        return DocumentFault(place, f"expected a JSON object, found {_json_kind(value)}")
    if field not in value:
        known = ", ".join(sorted(value)[:10])
        return DocumentFault(place, f'no field "{field}"; the line has: {known}'[:300])
    document = value[field]
    if not isinstance(document, str):
        return DocumentFault(place, f'"{field}" is {_json_kind(document)}, expected a string')
    try:
        document.encode()
    except UnicodeEncodeError:
        return DocumentFault(place, f'"{field}" holds half of a surrogate pair (\\ud800-\\udfff)')
    return document


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    return "an array" if isinstance(value, list) else "a string"


def synthetic_store(source: SyntheticSource, tokenizer: Tokenizer) -> TokenStore:
    """Generate documents: arithmetic progressions modulo the vocabulary, one token in 16 random.

    Raises:
        DataError: it would not fit in memory.
    """
    if source.num_documents * source.document_tokens > MAX_SYNTHETIC_TOKENS:
        raise DataError(
            f"{source.num_documents} synthetic documents of {source.document_tokens} tokens are "
            f"more than {MAX_SYNTHETIC_TOKENS} tokens",
            "lower num_documents or document_tokens",
        )
    ordinary = max(tokenizer.vocab_size - 1, 1)
    seed = mix(np.array([source.seed], dtype=np.uint64))
    document = mix(seed + np.arange(source.num_documents, dtype=np.uint64) * GOLDEN)
    spread = source.document_tokens // 2
    lengths = source.document_tokens - spread + (document % np.uint64(2 * spread + 1)).astype(int)
    offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
    owner = np.repeat(np.arange(source.num_documents), lengths + 1)
    place = np.arange(offsets[-1]) - offsets[owner]
    noise = mix(mix(document)[owner] + place.astype(np.uint64) * GOLDEN)
    start, stride = mix(document ^ GOLDEN) >> np.uint64(32), document % np.uint64(7) + np.uint64(1)
    tokens = (start[owner] + stride[owner] * place.astype(np.uint64)) % np.uint64(ordinary)
    tokens = np.where(
        noise % np.uint64(16) == 0, (noise >> np.uint64(32)) % np.uint64(ordinary), tokens
    )
    tokens += tokens >= tokenizer.eos_id  # every id but that of eos
    tokens[offsets[1:] - 1] = tokenizer.eos_id
    tokens = tokens.astype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    return TokenStore(
        tokens=tokens,
        offsets=offsets,
        eos_id=tokenizer.eos_id,
        fingerprint=xxh3_128_hexdigest(tokens.tobytes()),
        place="synthetic",
    )
