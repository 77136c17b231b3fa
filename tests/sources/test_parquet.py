"""Parquet files: every row is a document, and what cannot be read says where it stands."""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.engine.core.errors import DataError, EnvironmentFault
from trainer.engine.core.extras import install_command
from trainer.engine.sources import parquet
from trainer.engine.sources.documents import DocumentFault
from trainer.engine.sources.parquet import ParquetSource

TEXTS = [f"document {number} " + "ä€\n" * (number % 7) for number in range(1000)]


def write(path: Path, columns: dict[str, object], rows_a_group: int = 64) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=rows_a_group)


def documents(path: Path, **settings: object) -> list[object]:
    return list(ParquetSource(path=str(path), **settings).documents())


def faults(found: list[object]) -> list[str]:
    return [str(item) for item in found if isinstance(item, DocumentFault)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deeper").mkdir(parents=True)
    for name, start in (("a", 0), ("b", 400), ("deeper/c", 700)):
        stop = {"a": 400, "b": 700, "deeper/c": 1000}[name]
        write(folder / f"{name}.parquet", {"id": range(start, stop), "text": TEXTS[start:stop]})
    (folder / "notes.txt").write_text("not data")
    return folder


def test_rows_of_a_folder_come_in_the_order_of_the_files(folder: Path) -> None:
    assert documents(folder) == TEXTS
    assert documents(folder / "*.parquet") == TEXTS[:700]
    assert documents(folder / "b.parquet") == TEXTS[400:700]


def test_parts_hold_every_document_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "PART_BYTES", 4000)
    source = ParquetSource(path=str(folder))
    parts = source.parts()
    assert len(parts) > 6
    assert [text for part in parts for text in source.read(part)] == TEXTS


@pytest.mark.parametrize("rows_a_group", [1, 64, 1000])
@pytest.mark.parametrize("batch", [1, 7, 4096])
def test_reading_from_any_row_gives_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_a_group: int, batch: int
) -> None:
    monkeypatch.setattr(parquet, "BATCH_ROWS", batch)
    values = [None if number % 90 == 5 else text for number, text in enumerate(TEXTS[:200])]
    write(tmp_path / "a.parquet", {"text": values}, rows_a_group)
    source = ParquetSource(path=str(tmp_path / "a.parquet"))
    (part,) = source.parts()
    whole = list(source.read(part))
    assert len(whole) == 200
    for first in (0, 1, 63, 64, 65, 199, 200, 300):
        assert list(source.read_from(part, first)) == whole[first:]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_arrow_type_of_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    plain = pa.array(TEXTS[:50])
    values = plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain.cast(kind)
    write(tmp_path / "a.parquet", {"text": values}, 20)
    assert documents(tmp_path / "a.parquet") == TEXTS[:50]


def test_dots_lead_into_structs_but_a_column_of_that_name_comes_first(tmp_path: Path) -> None:
    nested = [{"body": {"raw": text}, "n": 1} for text in TEXTS[:30]]
    write(tmp_path / "a.parquet", {"page": nested, "x": TEXTS[30:60]}, 8)
    assert documents(tmp_path / "a.parquet", field="page.body.raw") == TEXTS[:30]
    write(tmp_path / "b.parquet", {"page.body.raw": TEXTS[60:90], "x": TEXTS[:30]}, 8)
    assert documents(tmp_path / "b.parquet", field="page.body.raw") == TEXTS[60:90]


def test_a_null_within_structs_is_a_fault_of_its_row(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"page": [{"raw": "a"}, None, {"raw": None}, {"raw": "b"}]})
    found = documents(tmp_path / "a.parquet", field="page.raw")
    assert found[0::3] == ["a", "b"]
    place = f"{tmp_path / 'a.parquet'}, row"
    reason = '"page.raw" is null, expected a string'
    assert faults(found) == [f"{place} 2: {reason}", f"{place} 3: {reason}"]


def test_bytes_that_are_not_utf8_are_a_fault(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": [b"good", b"bad \xff", b"good"]})
    found = documents(tmp_path / "a.parquet")
    assert found[0::2] == ["good", "good"]
    assert f"{tmp_path / 'a.parquet'}, row 2: " in faults(found)[0]
    assert "0xff" in faults(found)[0]


def test_a_column_of_numbers_or_no_column_is_a_fault_of_each_row(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": [1, 2, 3], "title": ["x", "y", "z"]})
    found = documents(tmp_path / "a.parquet")
    assert [fault.rpartition("row ")[2] for fault in faults(found)] == [
        f'{row}: "text" is int64, expected strings' for row in (1, 2, 3)
    ]
    missing = faults(documents(tmp_path / "a.parquet", field="titel"))
    assert len(missing) == 3
    assert 'no field "titel"; there is: text, title; did you mean "title"?' in missing[0]


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "footer"])
def test_what_is_no_parquet_file_is_one_fault(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "b.parquet"
    write(tmp_path / "a.parquet", {"text": TEXTS[:10]})
    write(path, {"text": TEXTS[10:20]})
    write(tmp_path / "c.parquet", {"text": TEXTS[20:30]})
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "text": b"hello\n" * 100,
            "cut": content[: len(content) // 2],
            "footer": content[:-300] + bytes(292) + content[-8:],
        }[damage]
    )
    found = documents(tmp_path)
    assert [item for item in found if isinstance(item, str)] == TEXTS[:10] + TEXTS[20:30]
    (fault,) = faults(found)
    assert fault.startswith(f"{path}: not a Parquet file: ")


def test_a_damaged_page_costs_the_rows_of_its_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, {"text": TEXTS[:300]}, 100)
    place = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = place.dictionary_page_offset or place.data_page_offset
    content[start : start + place.total_compressed_size] = b"\xff" * place.total_compressed_size
    path.write_bytes(content)
    found = documents(path)
    assert found[:100] + found[200:] == TEXTS[:100] + TEXTS[200:300]
    numbers = [fault.split(", row ")[1].split(":")[0] for fault in faults(found)]
    assert numbers == [str(number) for number in range(101, 201)]
    source = ParquetSource(path=str(path))
    (part,) = source.parts()
    for first in (99, 100, 150, 200, 201):
        assert list(source.read_from(part, first)) == found[first:]


def test_one_column_is_read_and_memory_stays_small(tmp_path: Path) -> None:
    """A group of 64 MB beside another column of 64 MB."""
    rows = 2000
    texts = [f"{number:08d}" * 4096 for number in range(rows)]
    table = pa.table({"text": texts, "other": texts[::-1]})
    # Else its pages would be large: what is in one page is decompressed together.
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows, write_batch_size=16)
    del texts, table
    before = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    largest = 0
    for count, text in enumerate(documents_of(tmp_path / "a.parquet")):
        assert text == f"{count:08d}" * 4096
        largest = max(largest, pool.bytes_allocated() - before)
    assert count == rows - 1
    assert largest < 24 * 2**20


@pytest.mark.parametrize("store_schema", [True, False], ids=["dictionary", "strings"])
def test_a_small_file_cannot_fill_the_memory(tmp_path: Path, store_schema: bool) -> None:
    """One value of 8 MB, 4096 times over: some kilobytes in a dictionary."""
    numbers = pa.array([0] * 4096, pa.int32())
    repeated = pa.DictionaryArray.from_arrays(numbers, pa.array(["x" * 2**23]))
    table, path = pa.table({"text": repeated}), tmp_path / "a.parquet"
    pq.write_table(table, path, compression="zstd", store_schema=store_schema)
    assert path.stat().st_size < 2**16
    pool = pa.default_memory_pool()
    before = pa.total_allocated_bytes()
    for count, text in enumerate(documents_of(path)):
        assert len(text) == 2**23
        assert pool.bytes_allocated() - before < 300 * 2**20
        if count == 40:
            break


def test_a_value_that_is_too_large_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MAX_DOCUMENT_BYTES", 2**20)
    write(tmp_path / "a.parquet", {"text": ["a", "b" * (2**20 + 1), "c"]})
    found = documents(tmp_path / "a.parquet")
    assert found[::2] == ["a", "c"]
    (fault,) = faults(found)
    assert fault.endswith('a.parquet, row 2: "text" is larger than 1 MiB')


def documents_of(path: Path):
    return ParquetSource(path=str(path)).documents()


def test_nothing_that_matches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.parquet in this folder"):
        ParquetSource(path=str(tmp_path)).parts()


def test_a_missing_package_is_named_with_its_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(EnvironmentFault) as error:
        ParquetSource(path=str(folder)).parts()
    assert install_command("data") in error.value.hint
