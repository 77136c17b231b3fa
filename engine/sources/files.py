"""Which files a source means, and the documents in files of text and of JSON lines."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from glob import glob, has_magic
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError
from ..core.files import open_regular
from ..tokenizers.tokenizer import MaskedDocument
from .documents import (
    PART_BYTES,
    ByteSpan,
    Document,
    DocumentFault,
    Part,
    file_parts,
    skip_line,
    text_of,
)

# Larger text files become several documents; a longer line of JSON is a fault.
MAX_DOCUMENT_BYTES = 2**26
FINGERPRINT_BYTES = 2**14
SAVED_SPLIT, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""the files that `save_to_disk` of the datasets library writes for one split, and for several"""
JSON_KINDS = {
    type(None): "null", dict: "an object", bool: "true or false", int: "a number",
    float: "a number", list: "an array", str: "a string",
}  # fmt: skip

# Installed packages, tests full of deliberately odd text, and a module that differs by machine.
PYTHON_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PYTHON_LEFT_OUT_PREFIX = "_sysconfigdata"


def python_files() -> list[tuple[str, os.stat_result]]:
    """Return the path and status of each module of the standard library, in a fixed random order.

    The order follows a hash of the path within the library, so that any run of modules, such as the
    held-out tail, is a random sample.

    Raises:
        DataError: the library is not in a folder.
    """
    root = sysconfig.get_path("stdlib")
    if not os.path.isdir(root):
        raise DataError(
            f"{root}: this interpreter's standard library is not there as files",
            'use another source, such as "text"',
        )
    modules: list[tuple[bytes, str, os.stat_result]] = []
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
                    modules.append((blake2b(inside.encode()).digest(), entry.path, entry.stat()))
    return [(path, status) for _, path, status in sorted(modules, key=itemgetter(0))]


def python_documents(max_bytes: int) -> Iterator[Document]:
    """Yield the texts of the standard library's modules, at most `max_bytes` bytes (0: all)."""
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
        files = [Path(match) for match in glob(str(path), recursive=True)]
    files = sorted(file for file in files if file.is_file())
    if not files:
        what = "no such file"
        if path.exists():
            what = f"no {suffix or 'files'} in this folder" if path.is_dir() else "not a plain file"
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


def content_fingerprint(pattern: str, suffix: str) -> str:
    """Return a hash of the files' names, sizes, and first and last bytes, wherever they are."""
    files = matching_files(pattern, suffix)
    root = os.path.commonpath([file.parent for file in files])
    states = []
    for file in files:
        try:
            with open_regular(file) as opened:
                size = os.fstat(opened.fileno()).st_size
                ends = opened.read(FINGERPRINT_BYTES)
                opened.seek(max(size - FINGERPRINT_BYTES, 0))
                ends += opened.read(FINGERPRINT_BYTES)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
        states.append((os.path.relpath(file, root), size, xxh3_128_hexdigest(ends)))
    return xxh3_128_hexdigest(repr(states).encode())


def text_parts(pattern: str, suffix: str) -> list[Part]:
    """Return parts whose spans are documents: whole files, or lines of files over 64 MiB."""
    return file_parts(matching_files(pattern, suffix), MAX_DOCUMENT_BYTES)


def line_parts(pattern: str, suffix: str) -> list[Part]:
    """Return parts of whole lines."""
    return file_parts(matching_files(pattern, suffix), PART_BYTES)


def read_text(part: Part) -> Iterator[Document]:
    """Yield a document a span; more of one that is large for want of lines to cut it at."""
    for file, start, stop in part:
        while True:
            try:
                with open_regular(file) as opened:
                    opened.seek(start)
                    block = opened.read(min(stop - start, 2 * MAX_DOCUMENT_BYTES))
            except OSError as error:
                yield DocumentFault(file, str(error.strerror))
                break
            if start + len(block) < stop:
                block = _whole_characters(block)
            if not block:
                break
            yield decode(block, file, 1, start)
            start += len(block)


def _whole_characters(block: bytes) -> bytes:
    """Return the block without its last character, which may continue after it."""
    end = len(block) - 1
    while end > len(block) - 4 and block[end] & 0xC0 == 0x80:  # 10xxxxxx continues a character
        end -= 1
    return block[: max(end, 0)]


def decode(block: bytes, file: str, line: int, start: int) -> str | DocumentFault:
    """Return UTF-8 text without a byte-order mark, or where it stops being UTF-8.

    The block begins with line `line`, counted from byte `start` of the file on.
    """
    try:
        return block.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line += block.count(b"\n", 0, error.start)
        reason = f"byte 0x{block[error.start]:02x} is not UTF-8 ({error.reason})"
        return DocumentFault(file, reason, line, start)


def read_objects(
    part: Part, document: Callable[[dict[str, Any]], str | MaskedDocument]
) -> Iterator[Document]:
    """Yield a document for each line of JSON; blank lines are skipped.

    Args:
        part: whole lines of files.
        document: turns the object of a line into a document; a ValueError says what is wrong.
    """
    for span in part:
        for number, line in _lines(span):
            if isinstance(line, DocumentFault):
                yield line
                continue
            try:
                parsed = document(_parse_object(line))
                text_of(parsed).encode()
            except UnicodeEncodeError:
                reason = "its text holds half of a surrogate pair (\\ud800-\\udfff)"
                yield DocumentFault(span.file, reason, number, span.start)
            except ValueError as error:
                yield DocumentFault(span.file, str(error), number, span.start)
            else:
                yield parsed


def _lines(span: ByteSpan) -> Iterator[tuple[int, str | DocumentFault]]:
    """Yield each line that is not blank, with its number in the span."""
    number = 0
    try:
        with open_regular(span.file) as file:
            file.seek(span.start)
            left = span.stop - span.start
            while left > 0 and (line := file.readline(MAX_DOCUMENT_BYTES)):
                number += 1
                left -= len(line)
                if len(line) == MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
                    left -= skip_line(file)
                    reason = f"line longer than {MAX_DOCUMENT_BYTES >> 20} MiB"
                    yield number, DocumentFault(span.file, reason, number, span.start)
                elif not line.isspace():
                    yield number, decode(line, span.file, number, span.start)
    except OSError as error:
        yield number, DocumentFault(span.file, str(error.strerror), number + 1, span.start)


def _parse_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {json_kind(value)}")
    return value


def require_field(line: Mapping[str, Any], field: str) -> Any:
    """Return the value of a key of a line's object.

    Raises:
        ValueError: there is no such key.
    """
    if field not in line:
        known = ", ".join(sorted(line)[:10])
        raise ValueError(f'no field "{field}"; the line has: {known}'[:300])
    return line[field]


def require_text(line: Mapping[str, Any], field: str) -> str:
    """Return the text of a key of a line's object.

    Raises:
        ValueError: there is no such key, or its value is no text.
    """
    text = require_field(line, field)
    if not isinstance(text, str):
        raise ValueError(f'"{field}" is {json_kind(text)}, expected a string')
    return text


def json_kind(value: object) -> str:
    """Return the JSON type of a value of `json.loads`, with its article."""
    return JSON_KINDS[type(value)]


def infer_source(path: str) -> str:
    """Return the name of the source that reads a path or glob, by the names of the files."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in (SAVED_SPLIT, SAVED_SPLITS)):
        return "hf"
    for suffix in (".jsonl", ".parquet"):
        if folder.suffix == suffix or (folder.is_dir() and any(folder.rglob(f"*{suffix}"))):
            return suffix.removeprefix(".")
    return "text"
