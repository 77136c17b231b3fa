"""Reads and writes the header of a GGUF file, which is not trusted. Torch-free.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..core.files import open_regular
from ..core.text.display import quote_name

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_HEADER_BYTES = 2**28
MAX_ENTRIES = 2**22
"""most entries of an array, keys and tensors; the largest vocabularies have 300,000 tokens"""
STRING, ARRAY, BOOL, UINT32, FLOAT32 = 8, 9, 7, 4, 6
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
BLOCK = 32
"""numbers of a row that share a scale in Q8_0"""
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 8: ("Q8_0", BLOCK, 34), 30: ("BF16", 1, 2)}
"""number of a type that is read -> name, numbers in a block, bytes of a block"""
OTHER_TYPES = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        type: "F32", "F16", "BF16" or "Q8_0".
        shape: the shape with rows first; the file has it the other way around.
        offset: position of the first byte in the file.
    """

    type: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def bytes(self) -> int:
        """The size of the tensor in the file, in bytes."""
        numbers, size = next(rest for name, *rest in TYPES.values() if name == self.type)
        return math.prod(self.shape) // numbers * size


@dataclass(frozen=True)
class GgufHeader:
    """The keys of a GGUF file and the places of its tensors."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Cursor:
    """Reads values one after the other, and never past the end of the header.

    Args:
        file: the file, at the position after the magic number.
        path: its path, for messages.
    """

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self.file, self.path, self.position = file, path, len(MAGIC)

    def fail(self, why: str) -> CheckpointError:
        """Return the error of a damaged file."""
        return CheckpointError(f"{self.path} is damaged: {why}", "download it again")

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > MAX_HEADER_BYTES - self.position:
            raise self.fail(f"its header has more than {MAX_HEADER_BYTES} bytes")
        content = self.file.read(count)
        if len(content) < count:
            raise self.fail("it ends inside its header")
        self.position += count
        return content

    def numbers(self, kind: int, count: int = 1) -> list[Any]:
        """Return numbers of a type."""
        form = f"<{count}{NUMBERS[kind]}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))

    def count(self) -> int:
        """Return a number of things that follow."""
        (found,) = self.numbers(10)
        if found > MAX_ENTRIES:
            raise self.fail(f"{found} entries; at most {MAX_ENTRIES} are read")
        return int(found)

    def text(self) -> str:
        """Return a string."""
        (length,) = self.numbers(10)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """Return a value of a type; arrays do not nest."""
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.numbers(kind)[0]
        if kind != ARRAY:
            raise self.fail(f"a value of the unknown type {kind}")
        (inner,), count = self.numbers(UINT32), self.count()
        if inner == STRING:
            return [self.text() for _ in range(count)]
        if inner not in NUMBERS:
            raise self.fail(f"an array of the type {inner}")
        return self.numbers(inner, count)


def read_header(path: Path) -> GgufHeader:
    """Return the keys and tensors of a GGUF file, after a check that the file holds them.

    Raises:
        CheckpointError: the file cannot be read, is damaged or hostile, or holds tensors of a type
            that is not read.
    """
    try:
        with open_regular(path) as file:
            if (magic := file.read(len(MAGIC))) != MAGIC:
                raise CheckpointError(f"{path} is no GGUF file: it begins with {magic!r}")
            size = path.stat().st_size
            return _parse(_Cursor(file, path), size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _parse(cursor: _Cursor, size: int) -> GgufHeader:
    (version,) = cursor.numbers(UINT32)
    if version not in (2, VERSION):
        raise CheckpointError(
            f"{cursor.path} is of GGUF's version {version}; 2 and {VERSION} are read",
            "files of big-endian machines and of before 2023 have to be converted by llama.cpp",
        )
    num_tensors, num_keys = cursor.count(), cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        name, (kind,) = cursor.text(), cursor.numbers(UINT32)
        if name in metadata:
            raise cursor.fail(f"{quote_name(name)} is given twice")
        metadata[name] = cursor.value(kind)
    listed = [_parse_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
        raise cursor.fail(f"an alignment of {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GgufTensor(each.type, each.shape, start + each.offset) for name, each in listed
    }
    if len(tensors) < len(listed):
        raise cursor.fail("a tensor is given twice")
    for name, tensor in tensors.items():
        if tensor.offset + tensor.bytes > size:
            raise cursor.fail(f"{quote_name(name)} reaches past its end")
    return GgufHeader(metadata, tensors)


def _parse_tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    name, (dims,) = cursor.text(), cursor.numbers(UINT32)
    if not 1 <= dims <= 4:
        raise cursor.fail(f"{quote_name(name)} has {dims} dimensions")
    shape = tuple(reversed(cursor.numbers(10, dims)))
    (kind,), (offset,) = cursor.numbers(UINT32), cursor.numbers(10)
    if kind not in TYPES:
        known = OTHER_TYPES.get(kind, f"number {kind}")
        raise CheckpointError(
            f"{cursor.path}: {quote_name(name)} is of the type {known}, which is not read; "
            f"{', '.join(each for each, *_ in TYPES.values())} are",
            "fetch the model in one of these types",
        )
    if math.prod(shape) >= 2**62 or shape[-1] % TYPES[kind][1]:
        raise cursor.fail(f"{quote_name(name)} has the shape {list(shape)}")
    return name, GgufTensor(TYPES[kind][0], shape, offset)


def lay_out_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int]]]
) -> tuple[bytes, dict[str, GgufTensor], int]:
    """Return the header of a GGUF file, the place of each tensor, and the size of the file.

    Args:
        metadata: integers are written as uint32, numbers with a fraction as float32.
        tensors: type and shape, rows first, of each tensor by name.
    """
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    parts += [_encode_text(key) + _encode_value(value) for key, value in metadata.items()]
    offset, places = 0, {}
    numbers = {name: number for number, (name, *_) in TYPES.items()}
    for name, (kind, shape) in tensors.items():
        places[name] = GgufTensor(kind, tuple(shape), offset)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_encode_text(name) + sizes + struct.pack("<IQ", numbers[kind], offset))
        offset += -(-places[name].bytes // ALIGNMENT) * ALIGNMENT
    head = b"".join(parts)
    head += b"\0" * (-len(head) % ALIGNMENT)
    moved = {
        name: GgufTensor(each.type, each.shape, len(head) + each.offset)
        for name, each in places.items()
    }
    return head, moved, len(head) + offset


def _encode_text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _encode_value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = STRING if value and isinstance(value[0], str) else 5
        head = struct.pack("<IIQ", ARRAY, kind, len(value))
        if kind == STRING:
            return head + b"".join(map(_encode_text, value))
        return head + struct.pack(f"<{len(value)}i", *value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _encode_text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    form, kind = ("f", FLOAT32) if isinstance(value, float) else ("I", UINT32)
    return struct.pack(f"<I{form}", kind, value)
