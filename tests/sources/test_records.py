"""Records: samples with named fields, from each kind of source."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from trainer.engine.core.errors import DataError, RecipeError
from trainer.engine.sources.chat import ChatSource
from trainer.engine.sources.configs import JsonlSource, TextSource
from trainer.engine.sources.documents import DocumentFault, Record
from trainer.engine.sources.hub import HFSource
from trainer.engine.sources.parquet import ParquetSource
from trainer.engine.sources.python_library import PythonSource

ROWS = [
    {"sentence": f"text {number}", "label": number % 3, "tags": ["a", "b"][: number % 3]}
    for number in range(50)
]
ANSWERS = {"text": ["Paris"], "answer_start": [3]}


def records(source, fields=("text", "label", "tags")):
    source = source.for_fields(fields)
    return [record for part in source.parts() for record in source.read_records(part)]


def write_lines(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


EXPECTED = [{"text": row["sentence"], "label": row["label"], "tags": row["tags"]} for row in ROWS]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf", "hf files"])
def test_fields_are_read_from_their_columns(tmp_path: Path, kind: str) -> None:
    keys = {"fields": {"text": "sentence"}}
    if kind == "jsonl":
        source = JsonlSource(path=write_lines(tmp_path / "a.jsonl", ROWS), **keys)
    elif kind == "hf":
        Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
        source = HFSource(path=str(tmp_path / "saved"), **keys)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=7)
        source = ParquetSource(path=str(tmp_path / "a.parquet"), **keys)
        if kind == "hf files":
            source = HFSource(path=str(tmp_path), **keys)
    found = records(source)
    assert [record.values for record in found] == EXPECTED
    place = str(found[8].make_fault("bad"))
    name = {"jsonl": "a.jsonl:9", "parquet": "a.parquet, row 9"}.get(kind, ", row 9")
    assert name in place
    assert place.endswith(": bad")


def test_field_names_the_column_of_the_text_too(tmp_path: Path) -> None:
    source = JsonlSource(path=write_lines(tmp_path / "a.jsonl", ROWS), field="sentence")
    assert records(source, ["text"])[3].values == {"text": "text 3"}


def test_a_missing_column_is_a_fault_with_file_line_and_nearest_name(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 1}, {"text": "b", "lable": 1}, {"text": "c", "label": 2}]
    file = write_lines(tmp_path / "a.jsonl", rows)
    first, fault, last = records(JsonlSource(path=file), ["text", "label"])
    assert isinstance(first, Record)
    assert str(fault) == (
        f'{file}:2: no field "label"; there is: lable, text; did you mean "lable"?'
    )
    assert last.values == {"text": "c", "label": 2}


def test_half_a_surrogate_pair_at_any_depth_is_a_fault(tmp_path: Path) -> None:
    rows = [{"text": "🙂", "tags": ["\\ud83d"]}, {"text": "🙂", "tags": [], "other": "\\ud83d"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).replace("\\\\ud83d", "\\ud83d")
    (tmp_path / "a.jsonl").write_text(lines)
    source = JsonlSource(path=str(tmp_path / "a.jsonl"))
    fault, record = records(source, ["text", "tags"])
    assert str(fault).startswith(f"{tmp_path / 'a.jsonl'}:1: its text holds half of a surrogate")
    assert record.values == {"text": "🙂", "tags": []}


@pytest.mark.parametrize("source", [ParquetSource, HFSource])
def test_a_missing_column_of_a_table_is_named(tmp_path: Path, source) -> None:
    pq.write_table(pa.table({"text": ["a"], "lable": [1]}), tmp_path / "a.parquet")
    try:
        (fault,) = records(source(path=str(tmp_path)), ["text", "label"])
        said = str(fault)
    except DataError as error:
        said = f"{error.message}; {error.hint}"
    assert 'no field "label"; there is: lable, text; did you mean "lable"?' in said


def test_a_field_without_a_column_is_left_out(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"chosen": "a", "rejected": "b"}])
    source = JsonlSource(path=file, fields={"prompt": ""})
    (record,) = records(source, ["prompt", "chosen", "rejected"])
    assert record.values == {"chosen": "a", "rejected": "b"}


def test_class_labels_of_a_dataset_become_their_names(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    data = Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)
    data.save_to_disk(tmp_path / "saved")
    found = records(HFSource(path=str(tmp_path / "saved")), ["text", "label"])
    assert [record.values["label"] for record in found] == ["pos", "neg", -1]


def test_structs_are_read_whole_or_by_dotted_paths(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"answers": ANSWERS}]), tmp_path / "a.parquet")
    file = write_lines(tmp_path / "a.jsonl", [{"answers": ANSWERS}])
    for kind, path in ((ParquetSource, str(tmp_path / "a.parquet")), (JsonlSource, file)):
        (record,) = records(kind(path=path, fields={"text": "answers.text"}), ["text", "answers"])
        assert record.values == {"text": ["Paris"], "answers": ANSWERS}
        (fault,) = records(kind(path=path, fields={"text": "answers.txt"}), ["text"])
        assert 'no field "answers.txt"; there is: answer_start, text; did you mean "text"?' in str(
            fault
        )


def test_a_row_that_is_no_text_is_a_fault_and_the_others_are_read(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array([b"a", b"\xff", b"c"], pa.binary()), "label": [1, 2, 3]})
    table = table.set_column(0, "text", table["text"].combine_chunks().view(pa.string()))
    pq.write_table(table, tmp_path / "a.parquet")
    found = records(ParquetSource(path=str(tmp_path / "a.parquet")), ["text", "label"])
    assert [record.values["label"] for record in found[::2]] == [1, 3]
    assert isinstance(found[1], DocumentFault)
    assert "row 2: " in str(found[1])


def test_documents_are_records_with_a_text_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    one, fault = records(TextSource(path=str(tmp_path)), ["text"])
    assert one == Record({"text": "one"}, str(tmp_path / "a.txt"))
    assert isinstance(fault, DocumentFault)
    library = records(PythonSource(max_bytes=50_000), ["text"])
    assert library[0].values["text"] == next(PythonSource(max_bytes=50_000).documents())
    with pytest.raises(RecipeError, match='the "text" source has no field "label"'):
        TextSource(path=str(tmp_path)).for_fields(["text", "label"])


def test_the_fingerprint_depends_on_the_columns_and_stays_for_documents(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", ROWS)
    plain = JsonlSource(path=file)
    assert plain.fingerprint().endswith(" text")
    mapped = JsonlSource(path=file, fields={"text": "sentence"}).for_fields(["text"])
    others = {plain.for_fields(["text"]).fingerprint(), mapped.fingerprint(), plain.fingerprint()}
    assert len(others) == 3
    ChatSource(path=file).for_fields(["prompt", "chosen", "rejected"])
