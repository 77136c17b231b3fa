"""Datasets of the `datasets` library: what it wrote is what is read, and the hub is optional."""

import time
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from pydantic import ValidationError

from trainer.engine.core.errors import DataError
from trainer.engine.corpus.prepare import open_or_prepare
from trainer.engine.sources import hub
from trainer.engine.sources.documents import DocumentFault
from trainer.engine.sources.hub import HFSource
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer

TEXTS = [f"document {number} " + "ä€\n" * (number % 7) for number in range(500)]


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps its files below the test's folder, and finds no hub."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "library"))
    hub.open_dataset.cache_clear()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Dataset.from_dict({"text": TEXTS, "id": range(500)}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for number in range(3):
        rows = Dataset.from_dict({"text": TEXTS[number::3]})
        rows.to_parquet(tmp_path / "files" / f"train-{number:05d}-of-00003.parquet")
    Dataset.from_dict({"text": ["held out"]}).to_parquet(tmp_path / "files" / "test.parquet")
    return tmp_path / "files"


def documents(path: Path, **settings: object) -> list[object]:
    return list(HFSource(path=str(path), **settings).documents())


def test_a_saved_dataset_gives_its_rows(saved: Path) -> None:
    assert documents(saved) == TEXTS
    assert documents(saved, streaming=True) == TEXTS


def test_parts_hold_every_document_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PART_BYTES", 2000)
    source = HFSource(path=str(saved))
    parts = source.parts()
    assert len(parts) > 3
    assert [text for part in parts for text in source.read(part)] == TEXTS


@pytest.mark.parametrize("streaming", [False, True])
def test_reading_from_any_row_gives_the_rest(saved: Path, files: Path, streaming: bool) -> None:
    for path in (saved, files):
        source = HFSource(path=str(path), streaming=streaming)
        for part in source.parts():
            whole = list(source.read(part))
            for first in (0, 1, 99, 165, 166, 500):
                assert list(source.read_from(part, first)) == whole[first:]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_of_data_files_is_read_split_by_split(files: Path, streaming: bool) -> None:
    train = [text for number in range(3) for text in TEXTS[number::3]]
    assert documents(files, streaming=streaming) == train
    assert documents(files, streaming=streaming, split_name="test") == ["held out"]
    if streaming:
        assert len(HFSource(path=str(files), streaming=True).parts()) == 3


def test_splits_saved_together_are_told_apart(tmp_path: Path) -> None:
    splits = {
        "train": Dataset.from_dict({"text": TEXTS}),
        "dev": Dataset.from_dict({"text": ["d"]}),
    }
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert documents(tmp_path / "saved") == TEXTS
    assert documents(tmp_path / "saved", split_name="dev") == ["d"]
    with pytest.raises(DataError, match='no split "trian"; there is: dev, train') as error:
        documents(tmp_path / "saved", split_name="trian")
    assert error.value.hint == 'did you mean "train"?'


def test_fields_within_structs_and_nulls(tmp_path: Path) -> None:
    rows = [{"raw": "a"}, {"raw": None}, None, {"raw": "b"}]
    Dataset.from_dict({"page": rows}).save_to_disk(tmp_path / "saved")
    found = documents(tmp_path / "saved", field="page.raw")
    assert [item for item in found if isinstance(item, str)] == ["a", "b"]
    faults = [str(item) for item in found if isinstance(item, DocumentFault)]
    reason = '"page.raw" is null, expected a string'
    assert faults == [f"{tmp_path / 'saved'}, row {row}: {reason}" for row in (2, 3)]


def test_an_unknown_field_names_those_that_there_are(saved: Path) -> None:
    with pytest.raises(DataError, match='no field "txt"; there is: id, text') as error:
        documents(saved, field="txt")
    assert error.value.hint == 'did you mean "text"?'


def test_a_selection_keeps_its_order(tmp_path: Path) -> None:
    """A shuffled dataset is saved as indices into the rows."""
    shuffled = Dataset.from_dict({"text": TEXTS}).shuffle(seed=1)
    shuffled.save_to_disk(tmp_path / "saved")
    assert documents(tmp_path / "saved") == shuffled["text"][:] != TEXTS


def test_damaged_arrow_files_are_a_data_error(saved: Path) -> None:
    (file,) = saved.glob("*.arrow")
    file.write_bytes(b"\0" * 1000)
    with pytest.raises(DataError, match=str(saved)):
        documents(saved)


def test_a_damaged_file_of_a_stream_is_a_fault_and_the_others_are_read(files: Path) -> None:
    (files / "train-00001-of-00003.parquet").write_bytes(b"no parquet at all")
    found = documents(files, streaming=True)
    (fault,) = [str(item) for item in found if isinstance(item, DocumentFault)]
    assert fault.startswith(f"{files}, shard 1, row 1: ")
    assert [item for item in found if isinstance(item, str)] == TEXTS[0::3] + TEXTS[2::3]


def test_tokens_are_those_of_the_rows(saved: Path, tmp_path: Path) -> None:
    store = open_or_prepare(HFSource(path=str(saved)), ByteTokenizer(), tmp_path / "cache")
    assert store.num_documents == 500
    assert bytes(store.tokens[store.tokens < 256].astype("uint8")) == "".join(TEXTS).encode()


def test_the_fingerprint_follows_the_rows_and_not_the_place(saved: Path, tmp_path: Path) -> None:
    before = HFSource(path=str(saved)).fingerprint()
    saved.rename(tmp_path / "moved")
    assert HFSource(path=str(tmp_path / "moved")).fingerprint() == before
    assert HFSource(path=str(tmp_path / "moved"), field="id").fingerprint() != before
    Dataset.from_dict({"text": TEXTS[::-1]}).save_to_disk(tmp_path / "other")
    assert HFSource(path=str(tmp_path / "other")).fingerprint() != before


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_does_not_answer_is_a_data_error_at_once(
    monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    source = HFSource(repo="someone/something", streaming=streaming)
    started = time.monotonic()
    for ask in (source.fingerprint, source.parts):
        with pytest.raises(DataError, match="someone/something: the Hugging Face hub") as error:
            ask()
        assert "network" in error.value.hint
    assert time.monotonic() - started < 60


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder") as error:
        documents(tmp_path / "nothing")
    assert "data.sources.repo" in error.value.hint


def test_an_unknown_split_of_data_files_is_an_error(files: Path) -> None:
    with pytest.raises(DataError, match=f"{files}: .*dev"):
        documents(files, split_name="dev")


@pytest.mark.parametrize("settings", [{}, {"path": "a", "repo": "b/c"}])
def test_one_dataset_is_named(settings: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"either path .* or repo"):
        HFSource(**settings)


def test_a_script_beside_the_data_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "tricky"
    Dataset.from_dict({"text": ["a"]}).to_parquet(folder / "train.parquet")
    script = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (folder / "tricky.py").write_text(script)
    with pytest.raises(DataError, match="scripts are no longer supported"):
        documents(folder)
    assert not (tmp_path / "ran").exists()


def test_arrow_types_of_text(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(TEXTS[:9], pa.large_string())})
    Dataset(table).save_to_disk(tmp_path / "saved")
    assert documents(tmp_path / "saved") == TEXTS[:9]
