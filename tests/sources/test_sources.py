"""Documents from files: what is read, and what is said of what cannot be."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from trainer.engine.core.errors import DataError
from trainer.engine.corpus.configs import SyntheticSource
from trainer.engine.corpus.prepare import open_or_prepare, open_source
from trainer.engine.corpus.store import TokenStore
from trainer.engine.sources import files as sources
from trainer.engine.sources import python_library
from trainer.engine.sources.configs import DocumentSource, JsonlSource, TextSource
from trainer.engine.sources.documents import DocumentFault
from trainer.engine.sources.python_library import PythonSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

GOOD = b'{"text": "good"}\n'

# line -> what the fault must say
BROKEN_LINES = {
    "truncated": (b'{"text": "cut of', "not JSON"),
    "not_utf8": (b'{"text": "\xff\xfe"}', "byte 0xff is not UTF-8"),
    "missing_field": (b'{"txt": "a", "id": 1}', 'no field "text"; the line has: id, txt'),
    "null": (b'{"text": null}', '"text" is null, expected a string'),
    "number": (b'{"text": 3.5}', '"text" is a number, expected a string'),
    "boolean": (b'{"text": true}', '"text" is true or false, expected a string'),
    "array": (b'{"text": ["a"]}', '"text" is an array, expected a string'),
    "object": (b'{"text": {"a": 1}}', '"text" is an object, expected a string'),
    "not_an_object": (b'"just a string"', "expected a JSON object, found a string"),
    "lone_surrogate": (b'{"text": "\\ud800"}', "surrogate"),
    "odd_field": (b'{"\\ud800\\u001b[31m": "a"}', r"the line has: \ud800\x1b[31m"),
    "deeply_nested": (b'{"text": ' + b"[" * 100_000 + b"}", "not JSON"),
    "huge_number": (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "not JSON"),
    "null_bytes": (b"\0" * 20, "not JSON"),
    "bom_in_the_middle": (b"\xef\xbb\xbf\xef\xbb\xbf{}", "not JSON"),
}


def texts(store: TokenStore) -> list[str]:
    tokenizer = ByteTokenizer()
    borders = pairwise(store.offsets)
    return [tokenizer.decode(store.tokens[start:stop].tolist()) for start, stop in borders]


def opened(source: DocumentSource, cache: Path) -> TokenStore:
    return open_or_prepare(source, ByteTokenizer(), cache)


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_broken_line_stops_with_file_and_line(tmp_path: Path, name: str) -> None:
    line, reason = BROKEN_LINES[name]
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(GOOD * 2 + line + b"\n" + GOOD)
    with pytest.raises(DataError) as error:
        opened(JsonlSource(path=str(file)), tmp_path / "cache")
    assert str(error.value).startswith(f"{file}:3: ")
    assert reason in str(error.value)
    assert 'on_error = "skip"' in error.value.hint
    assert not list((tmp_path / "cache").glob("*/tokens.json"))


def test_broken_lines_are_counted_and_skipped_on_request(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    broken = [line for line, _ in BROKEN_LINES.values()]
    file.write_bytes(b"".join(GOOD + line + b"\n" for line in broken) + GOOD)
    store = opened(JsonlSource(path=str(file), on_error="skip"), tmp_path / "cache")
    assert texts(store) == ["good"] * (len(broken) + 1)
    assert store.skipped == len(broken)
    assert [fault.split(":")[1] for fault in store.faults] == [
        str(2 * number + 2) for number in range(len(broken))
    ]
    index = json.loads(next((tmp_path / "cache").glob("*/tokens.json")).read_text())
    assert index["skipped"] == len(broken)


def test_a_line_over_the_limit_is_one_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 2**20)
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(GOOD + b'{"text": "' + b"x" * (5 * 2**20) + b'"}\n' + GOOD)
    store = opened(JsonlSource(path=str(file), on_error="skip"), tmp_path / "cache")
    assert texts(store) == ["good", "good"]
    assert list(store.faults) == [f"{file}:2: line longer than 1 MiB"]


def test_a_bom_blank_lines_and_crlf_are_no_faults(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    store = opened(JsonlSource(path=str(file)), tmp_path / "cache")
    assert texts(store) == ["a", "b"]


def test_empty_documents_and_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"")
    (tmp_path / "in" / "b.jsonl").write_bytes(b'{"text": ""}\n{"text": "b"}\n')
    store = opened(JsonlSource(path=str(tmp_path / "in")), tmp_path / "cache")
    assert texts(store) == ["b"]
    assert store.skipped == 0


def test_a_source_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match='the "text" source holds no text'):
        opened(TextSource(path=str(tmp_path / "empty.txt")), tmp_path / "cache")


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "a", "body": "b"}\n')
    cache = tmp_path / "cache"
    assert texts(opened(JsonlSource(path=str(file)), cache)) == ["a"]
    assert texts(opened(JsonlSource(path=str(file), field="body"), cache)) == ["b"]


def test_a_text_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("eins\nzwei\ndräi\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt:3: byte 0xe4 is not UTF-8"):
        opened(TextSource(path=str(file)), tmp_path / "cache")


def test_text_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a.txt", ".hidden/x.txt", "a/.hidden"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    cache = tmp_path / "cache"
    assert texts(opened(TextSource(path=str(tmp_path / "in")), cache)) == [
        "a/z.txt",
        "a.txt",
        "b.txt",
    ]
    pattern = str(tmp_path / "in" / "*.txt")
    assert texts(opened(TextSource(path=pattern), cache)) == ["a.txt", "b.txt"]


def test_a_bom_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts(opened(TextSource(path=str(tmp_path / "bom.txt")), tmp_path / "c")) == ["hello"]


def test_a_large_text_file_becomes_parts_that_end_with_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 100)
    text = "".join(f"line {number} é\n" for number in range(60))
    file = tmp_path / "large.txt"
    file.write_text(text, encoding="utf-8")
    parts = list(TextSource(path=str(file)).documents())
    assert len(parts) > 3
    assert all(isinstance(part, str) and part.endswith("\n") for part in parts)
    assert "".join(part for part in parts if isinstance(part, str)) == text
    file.write_bytes(text.encode() + b"\xff")
    fault = list(TextSource(path=str(file)).documents())[-1]
    assert isinstance(fault, DocumentFault)
    assert fault.place == f"{file}:61"


def test_an_unreadable_file_is_a_fault_of_that_file(tmp_path: Path) -> None:
    good, gone = tmp_path / "a.txt", tmp_path / "b.txt"
    for file in (good, gone):
        file.write_text("x")
    documents = TextSource(path=str(tmp_path)).documents()
    assert next(documents) == "x"
    gone.unlink()
    fault = next(documents)
    assert isinstance(fault, DocumentFault)
    assert (fault.place, fault.reason) == (str(gone), "No such file or directory")


@pytest.mark.parametrize("path", ["absent.jsonl", "absent/*.jsonl", "."])
def test_no_matching_file_is_an_error_that_names_the_path(tmp_path: Path, path: str) -> None:
    with pytest.raises(DataError) as error:
        opened(JsonlSource(path=str(tmp_path / path)), tmp_path / "cache")
    assert str(tmp_path / path) in str(error.value)


def test_the_python_source_holds_the_library_in_a_scattered_order(tmp_path: Path) -> None:
    files = [path for path, _ in python_library.list_library_modules()]
    names = [Path(path).name for path in files]
    assert {"argparse.py", "random.py", "tokenize.py"} <= set(names)
    assert not any("site-packages" in path or "/test/" in path for path in files)
    assert names != sorted(names)
    store = opened(PythonSource(max_bytes=200_000), tmp_path)
    assert 100_000 < store.num_tokens <= 200_000 + store.num_documents
    written = texts(store)
    assert written[0] == Path(files[0]).read_text(encoding="utf-8")
    assert opened(PythonSource(max_bytes=200_000), tmp_path).fingerprint == store.fingerprint


def test_synthetic_documents_depend_on_their_seed_alone_and_can_be_learned() -> None:
    source = SyntheticSource(num_documents=50, document_tokens=100)
    store, again, other = (
        open_source(config, ByteTokenizer(), Path())
        for config in (source, source, source.model_copy(update={"seed": 1}))
    )
    assert store.fingerprint == again.fingerprint != other.fingerprint
    assert store.num_documents == 50
    assert (store.tokens[store.offsets[1:] - 1] == 256).all()
    assert (store.tokens == 256).sum() == 50
    lengths = np.diff(store.offsets) - 1
    assert 50 <= lengths.min() < lengths.max() <= 150
    assert lengths.mean() == pytest.approx(100, rel=0.15)
    # Two tokens foretell the third, but for the noise: each random token spoils up to three.
    known, total = 0, 0
    for start, stop in zip(store.offsets, store.offsets[1:] - 1, strict=False):
        steps = np.diff(store.tokens[start:stop].astype(int)) % 256
        known, total = known + (np.diff(steps) == 0).sum(), total + len(steps) - 1
    assert 0.7 < known / total < 0.95


def test_synthetic_data_that_does_not_fit_in_memory_is_an_error() -> None:
    with pytest.raises(DataError, match="synthetic"):
        SyntheticSource(num_documents=2**40).open(ByteTokenizer(), Path())
