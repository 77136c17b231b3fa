"""Finds the files of a source, and reads documents from text and JSON lines files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_128_hexdigest

from ..core.errors import DataError
from ..core.files import open_regular
from ..tokenizers.tokenizer import MaskedDocument
from .compressed import is_compressed, open_text, plain_path
from .documents import (
    PART_BYTES,
    ByteSpan,
    Document,
    DocumentFault,
    Part,
    Record,
    select_fields,
    skip_line,
    split_files,
    text_of,
)

# Larger text files become several documents; a longer line of JSON is a fault.
MAX_DOCUMENT_BYTES = 2**26
FINGERPRINT_BYTES = 2**14
LINES, NEVER = ".jsonl", 2**62  # NEVER: the last byte of what has no known length
SAVED_SPLIT, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""files by which `save_to_disk` of the datasets library marks one split, and several splits"""
HALF_SURROGATE = "its text holds half of a surrogate pair (\\ud800-\\udfff)"
JSON_KINDS = {
    type(None): "null", dict: "an object", bool: "true or false", int: "a number",
    float: "a number", list: "an array", str: "a string",
}  # fmt: skip


def find_files(pattern: str, suffix: str) -> list[Path]:
    """Return the files of a path, folder or glob, sorted by name.

    Args:
        pattern: a file, a glob, or a folder, of which all files that are not hidden are taken.
        suffix: the suffix that files in a folder must have.

    Raises:
        DataError: there are no such files.
    """
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = [
            file
            for file in path.rglob("*")
            if (plain_path(file) if suffix == LINES else file).name.endswith(suffix)
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
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
    """Return a hash of the names, sizes and modification times of files."""
    return _hash_states(find_files(pattern, suffix), _file_state)


def content_fingerprint(pattern: str, suffix: str) -> str:
    """Return a hash of relative names, sizes, and first and last bytes, equal on all machines."""
    files = find_files(pattern, suffix)
    root = os.path.commonpath([file.parent for file in files])

    def describe(file: Path) -> tuple[str, int, str]:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            ends = opened.read(FINGERPRINT_BYTES)
            opened.seek(max(size - FINGERPRINT_BYTES, 0))
            ends += opened.read(FINGERPRINT_BYTES)
        return os.path.relpath(file, root), size, xxh3_128_hexdigest(ends)

    return _hash_states(files, describe)


def _file_state(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return str(file), status.st_size, status.st_mtime_ns


def _hash_states(files: Sequence[Path], describe: Callable[[Path], tuple[Any, ...]]) -> str:
    states = []
    for file in files:
        try:
            states.append(describe(file))
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from error
    return xxh3_128_hexdigest(repr(states).encode())


def split_text_files(pattern: str, suffix: str) -> list[Part]:
    """Return parts whose spans are one document each: a file, or a piece of a file over 64 MiB."""
    return split_files(find_files(pattern, suffix), MAX_DOCUMENT_BYTES)


def split_line_files(pattern: str, suffix: str) -> list[Part]:
    """Return parts whose spans hold whole lines, one document each."""
    return split_files(find_files(pattern, suffix), PART_BYTES)


def read_text(part: Part) -> Iterator[Document]:
    """Yield a document for each span, and several for a large span that has no line ends."""
    for file, start, stop in part:
        rest = b""
        try:
            with open_text(file, start) as opened:
                end = NEVER if is_compressed(file) else stop
                while start < end:
                    length = min(end - start, 2 * MAX_DOCUMENT_BYTES)
                    block = rest + opened.read(length - len(rest))
                    whole = block
                    if len(block) == length and start + length < end:
                        whole = _drop_partial_character(block)
                    if not whole:
                        break
                    yield decode(whole, file, 1, start)
                    rest = block[len(whole) :]
                    start += len(whole)
        except OSError as error:
            yield DocumentFault(file, str(error.strerror))


def _drop_partial_character(block: bytes) -> bytes:
    """Remove the last character of a block, because its bytes may continue in the next block."""
    end = len(block) - 1
    while end > len(block) - 4 and block[end] & 0xC0 == 0x80:  # 10xxxxxx continues a character
        end -= 1
    return block[: max(end, 0)]


def decode(block: bytes, file: str, line: int, start: int) -> str | DocumentFault:
    """Decode UTF-8 without a byte-order mark, or return a fault at the first invalid byte.

    Args:
        block: the bytes to decode.
        file: the path of the file.
        line: the number of the block's first line, where line 1 begins at byte `start`.
        start: the byte offset at which line 1 begins.
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
    """Yield a document or a fault for each line of JSON; blank lines are skipped.

    Args:
        part: spans of whole lines.
        document: turns the JSON object of a line into a document, or raises ValueError with the
            reason of the fault.
    """

    def parse(values: dict[str, Any]) -> str | MaskedDocument:
        parsed = document(values)
        try:
            text_of(parsed).encode()
        except UnicodeEncodeError as error:
            raise ValueError(HALF_SURROGATE) from error
        return parsed

    for parsed, _, _ in _parse_lines(part, parse):
        yield parsed


def read_line_records(part: Part, columns: Mapping[str, str]) -> Iterator[Record | DocumentFault]:
    """Yield a record or a fault for each line of JSON; blank lines are skipped.

    Args:
        part: spans of whole lines.
        columns: the key of each field.
    """

    def select(line: dict[str, Any]) -> dict[str, Any]:
        values = select_fields(line, columns)
        try:
            json.dumps(values, ensure_ascii=False).encode()  # text at any depth
        except UnicodeEncodeError as error:
            raise ValueError(HALF_SURROGATE) from error
        return values

    for values, span, number in _parse_lines(part, select):
        if isinstance(values, DocumentFault):
            yield values
        else:
            yield Record(values, span.file, number, span.start)


Parsed = TypeVar("Parsed")


def _parse_lines(
    part: Part, parse: Callable[[dict[str, Any]], Parsed]
) -> Iterator[tuple[Parsed | DocumentFault, ByteSpan, int]]:
    """Yield what each line that is not blank holds, or a fault, with its span and line number."""
    for span in part:
        for number, line in _lines(span):
            if isinstance(line, DocumentFault):
                yield line, span, number
                continue
            try:
                parsed: Parsed | DocumentFault = parse(_parse_object(line))
            except ValueError as error:
                parsed = DocumentFault(span.file, str(error), number, span.start)
            yield parsed, span, number


def _lines(span: ByteSpan) -> Iterator[tuple[int, str | DocumentFault]]:
    """Yield the lines of a span that are not blank, with their numbers from 1 within the span."""
    number = 0
    try:
        with open_text(span.file, span.start) as file:
            left = NEVER if is_compressed(span.file) else span.stop - span.start
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
    """Return the JSON type of a value, with its article, or the name of its class."""
    return JSON_KINDS.get(type(value), type(value).__name__)


def infer_source(path: str) -> str:
    """Return the name of the source that reads a path or glob, chosen by the file names."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in (SAVED_SPLIT, SAVED_SPLITS)):
        return "hf"
    for suffix in (LINES, ".parquet"):
        names = map(plain_path, folder.rglob("*")) if folder.is_dir() else [plain_path(folder)]
        if any(each.suffix == suffix for each in names):
            return suffix.removeprefix(".")
    return "text"
