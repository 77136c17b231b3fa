"""Small Parquet files that stand for much text."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.limits import limited
from trainer.engine.sources import parquet, parquet_pages
from trainer.engine.sources.documents import Document, DocumentFault
from trainer.engine.sources.parquet import ParquetSource
from trainer.engine.sources.parquet_pages import read_header


def read(path: Path) -> list[Document]:
    return list(ParquetSource(path=str(path)).documents())


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("values", ["long", "short", "null"])
def test_the_headers_tell_what_the_footer_of_an_honest_file_does(
    tmp_path: Path, version: str, dictionary: bool, values: str
) -> None:
    texts: list[str | None] = {
        "long": [f"{number}" * 5000 for number in range(100)],
        "short": [str(number % 100) for number in range(50_000)],
        "null": [None] * 1000 + ["ä" * 300],
    }[values]
    pq.write_table(
        pa.table({"text": texts}),
        tmp_path / "a.parquet",
        data_page_version=version,
        use_dictionary=dictionary,
        data_page_size=2**14,
        write_page_checksum=True,
    )
    chunk = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    end, unpacked, pages = start + chunk.total_compressed_size, 0, 0
    with open(tmp_path / "a.parquet", "rb") as file:
        while start < end:
            header, size, packed = read_header(file, start)
            unpacked, start, pages = unpacked + header + size, start + header + packed, pages + 1
    assert start == end
    assert unpacked == chunk.total_uncompressed_size
    assert pages > (values == "short")
    assert read(tmp_path / "a.parquet")[-1] == texts[-1]


def test_a_page_that_unpacks_to_much_more_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_pages, "ANY_PAGE_BYTES", 2**20)
    path = tmp_path / "a.parquet"
    columns: dict[str, Any] = {"text": ["a" * 2**22, "b"], "other": ["a" * 2**22, "b"]}
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=False)
    before = pa.default_memory_pool().bytes_allocated()
    faults = read(path)
    assert pa.default_memory_pool().bytes_allocated() - before < 2**20
    assert len(faults) == 2
    assert all(isinstance(each, DocumentFault) for each in faults)
    assert "unpacks to 4194" in str(faults[0])
    pq.write_table(pa.table(columns | {"text": ["a", "b"]}), path, compression="zstd")
    assert read(path) == ["a", "b"], "only the pages of its own column are a source's business"


def test_a_list_of_texts_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_pages, "ANY_PAGE_BYTES", 2**20)
    table = pa.table({"text": [["a" * 2**22]]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    (fault,) = read(tmp_path / "a.parquet")
    assert "unpacks to" in str(fault)


@pytest.mark.parametrize("store_schema", [True, False])
def test_a_value_that_is_repeated_without_end_ends_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_schema: bool
) -> None:
    monkeypatch.setattr(parquet, "TEXT_BESIDE", 2**22)
    monkeypatch.setattr(parquet, "TEXT_A_BYTE", 1)
    numbers = pa.array([0] * 500 + [1] * 10, pa.int32())
    repeated = pa.DictionaryArray.from_arrays(numbers, pa.array(["x" * 2**16, "y"]))
    path = tmp_path / "a.parquet"
    table = pa.table({"text": repeated})
    pq.write_table(table, path, row_group_size=500, compression="zstd", store_schema=store_schema)
    found = read(path)
    texts = [each for each in found if isinstance(each, str)]
    assert 32 <= texts.count("x" * 2**16) <= 64
    assert texts[-10:] == ["y"] * 10, "the next row group is read"
    assert len(found) == 510
    assert "too much text for its size" in str(found[499])


def test_many_values_of_a_large_dictionary_are_no_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch brings the whole dictionary along."""
    monkeypatch.setattr(parquet, "TEXT_BESIDE", 2**21)
    texts = [f"{number}" * 100 for number in range(2000)]
    table = pa.table({"text": pa.array(texts).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == texts


def test_damage_in_headers_is_a_fault_and_never_takes_long(tmp_path: Path) -> None:
    path, draw = tmp_path / "a.parquet", random.Random(5)
    texts = [str(number) * 9 for number in range(200)]
    pq.write_table(pa.table({"text": texts}), path, data_page_size=256, write_batch_size=8)
    chunk = pq.ParquetFile(path).metadata.row_group(0).column(0)
    content, first = path.read_bytes(), chunk.dictionary_page_offset or chunk.data_page_offset
    with limited(512):
        for _ in range(100):
            damaged = bytearray(content)
            place = draw.randrange(first, first + chunk.total_compressed_size)
            damaged[place] = draw.randrange(256)
            path.write_bytes(damaged)
            assert len(read(path)) == 200


@pytest.mark.matrix
def test_one_text_of_half_a_gigabyte_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.array(["a" * (500 * 10**6), "b"])})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    del table
    pa.default_memory_pool().release_unused()
    with limited(256):
        assert "unpacks to 5000000" in str(read(path)[0])
