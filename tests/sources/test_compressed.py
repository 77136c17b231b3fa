"""Compressed files give the documents of plain ones, and damaged ones are faults."""

import bz2
import gzip
import json
import lzma
import subprocess

import pytest
import zstandard

from tests.commands import run_trainer
from trainer.engine.sources import files
from trainer.engine.sources.configs import JsonlSource, TextSource
from trainer.engine.sources.documents import DocumentFault

PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}
LINES = "".join(json.dumps({"text": f"line {n} ü"}) + "\n" for n in range(500)).encode()


@pytest.mark.parametrize("suffix", PACK)
def test_lines_are_those_of_the_plain_file(tmp_path, suffix):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "packed").mkdir()
    packed = tmp_path / f"packed/a.jsonl{suffix}"
    # Two members one after the other are one file, as `cat` and parallel compressors make it.
    packed.write_bytes(PACK[suffix](LINES[:5000]) + PACK[suffix](LINES[5000:]))
    plain = [*JsonlSource(path=str(tmp_path / "a.jsonl")).documents()]
    assert len(plain) == 500
    for path in (packed, tmp_path / "packed", tmp_path / f"packed/*{suffix}"):
        assert [*JsonlSource(path=str(path)).documents()] == plain
    assert (
        files.infer_source(str(packed)) == files.infer_source(str(tmp_path / "packed")) == "jsonl"
    )


@pytest.mark.parametrize("suffix", PACK)
def test_text_is_that_of_the_plain_file_also_in_pieces(tmp_path, monkeypatch, suffix):
    text = "ü€𝄞" * 1000
    (tmp_path / f"a.txt{suffix}").write_bytes(PACK[suffix](text.encode()))
    source = TextSource(path=str(tmp_path / f"a.txt{suffix}"))
    assert [*source.documents()] == [text]
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 101)
    pieces = [*source.documents()]
    assert len(pieces) > 40
    assert "".join(pieces) == text


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("damage", ["cut", "spoiled"])
def test_damaged_data_are_a_fault_with_the_file(tmp_path, suffix, damage):
    content = PACK[suffix](LINES)
    middle = len(content) // 2
    content = content[:middle] if damage == "cut" else b"no" + content[2:]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(content)
    found = [*JsonlSource(path=str(path)).documents()]
    assert isinstance(found[-1], DocumentFault)
    assert str(path) in str(found[-1])


def test_a_file_of_the_usual_program_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    subprocess.run(["gzip", "-9", tmp_path / "a.jsonl"], check=True)
    assert len([*JsonlSource(path=str(tmp_path)).documents()]) == 500


def test_a_run_learns_from_compressed_lines(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(PACK[".zst"](LINES))
    (tmp_path / "bad.jsonl.gz").write_bytes(PACK[".gz"](LINES + b"{broken\n"))
    done = run_trainer(
        "data", "prepare", "a.jsonl.zst", "--tokenizer", "bytes", "--out", "tokens", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "500 documents" in done.stdout
    words = ["data", "train-tokenizer", "bad.jsonl.gz", "--vocab-size", "300", "--out"]
    done = run_trainer(*words, "t", folder=tmp_path)
    assert done.returncode == 4
    assert "bad.jsonl.gz:501" in done.stderr
    done = run_trainer(*words, "t", "--on-error", "skip", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 documents could not be read" in done.stdout
