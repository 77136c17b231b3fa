"""Files cut into parts: together every document once, and faults at their own lines."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.engine.sources import documents, files
from trainer.engine.sources.configs import DocumentSource, JsonlSource, TextSource
from trainer.engine.sources.documents import DocumentFault


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (documents, files):
        monkeypatch.setattr(module, "PART_BYTES", 100)
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 80)
    documents.count_lines_before.cache_clear()


def by_part(source: DocumentSource) -> list[list[object]]:
    return [list(source.read(pickle.loads(pickle.dumps(part)))) for part in source.parts()]


@pytest.mark.usefixtures("small_parts")
def test_lines_of_large_and_small_files_are_each_in_one_part(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(60)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines[:50]))
    for number in range(50, 60):
        (tmp_path / f"b{number}.jsonl").write_text(lines[number])
    read = by_part(JsonlSource(path=str(tmp_path)))
    assert len(read) > 10
    assert all(read)
    assert [text for part in read for text in part] == texts


@pytest.mark.usefixtures("small_parts")
def test_a_fault_in_a_later_part_is_named_by_its_line_in_the_file(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}\n'] * 40
    lines[33] = b'{"text": 3}\n'
    lines[36] = b'{"text": "' + b"x" * 300 + b'"}\n'
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(b"".join(lines))
    read = by_part(JsonlSource(path=str(file)))
    assert len(read) > 5
    faults = [fault for part in read for fault in part if isinstance(fault, DocumentFault)]
    assert [fault.place for fault in faults] == [f"{file}:34", f"{file}:37"]
    assert len([text for part in read for text in part]) == 40


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("character", ["x", "é", "☃", "🎉"])
def test_text_without_lines_is_cut_between_characters(tmp_path: Path, character: str) -> None:
    text = "." + character * 500
    (tmp_path / "a.txt").write_text(text)
    (read,) = by_part(TextSource(path=str(tmp_path)))
    pieces = [str(piece) for piece in read]
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert max(len(piece.encode()) for piece in pieces) <= 160


@pytest.mark.usefixtures("small_parts")
def test_a_file_that_is_gone_when_its_part_is_read_is_a_fault(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 70)
    source = TextSource(path=str(tmp_path))
    (part,) = source.parts()
    (tmp_path / "b.txt").unlink()
    assert list(source.read(part)) == [
        "x" * 70,
        DocumentFault(str(tmp_path / "b.txt"), "No such file or directory"),
    ]


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=30))
@settings(max_examples=40)
def test_spans_cover_a_file_and_end_with_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    file = tmp_path_factory.mktemp("spans") / "file"
    content = b"\n".join(lines)
    file.write_bytes(content)
    spans = [span for part in documents.split_files([file], 25) for span in part]
    assert b"".join(content[span.start : span.stop] for span in spans) == content
    assert all(content[: span.stop].endswith(b"\n") for span in spans[:-1])
    assert all(span.stop - span.start <= 25 + 41 for span in spans)
    for span in spans:
        assert documents.count_lines_before(str(file), span.start) == content[: span.start].count(
            b"\n"
        )
